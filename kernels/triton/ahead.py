"""Fetching ahead beside a layer that is computed: which of the next layer's experts, in one program, and their copies.

Plain twin, bit for bit: ``vllm_dymoe.residency.decode_ahead``. Names are those of ``Table`` and ``Copies``.
Both launches stand in a branch of the step: the first one beside a layer's own three, the second behind them, where the
link idles, until the next layer is decided.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.decide import (
    ELEMENTS_AT_ONCE,
    WARPS,
    add_to,
    bytes_ahead,
    count_pairs,
    tiers_of,
)
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.residency.checks import check_tensor
from vllm_dymoe.residency.constants import check_experts, experts_width, scratch_size

# Of one expert. Each has 8 KiB on its way, and a PCIe link of 50 GB/s with 2 us of latency needs 100 KB.
_PROGRAMS = 16
_WORDS = tl.constexpr(2048)  # int32, of a program at a time: 16 bytes four times for each thread

_OF_TABLE = (
    "tier", "reuse_high", "critical", "threshold", "bits", "offsets", "pool", "slot_bytes", "source", "ahead",
    "most_ahead", "staged", "staged_for", "counters",
)  # fmt: skip


def name_ahead(
    table: Mapping[str, Tensor],
    layer: int,
    ids: Tensor,
    scores: Tensor,
    rows: Tensor,
    copies: Mapping[str, Tensor],
    *,
    start: Start = run_kernel,
) -> None:
    """What ``name_ahead_plain`` does, in one launch.

    Args:
        table: the tensors of a Table, by name.
        layer: that is foreseen.
        ids: int32 or int64 [tokens, guesses].
        scores: float32 [tokens, guesses], 0 to 1.
        rows: int32 [1], how many tokens are real.
        copies: the tensors of Copies, by name.
        start: launch, or only compile.

    Raises:
        TypeError: a wrong dtype.
        ValueError: more experts than the program holds, or sizes that disagree.
    """
    experts, (tokens, guesses) = table["tier"].shape[1], ids.shape
    check_experts(experts)
    check_tensor("ids", ids, shape=(tokens, guesses))
    check_tensor("scores", scores, shape=(tokens, guesses), dtype=torch.float32)
    check_tensor("rows", rows, shape=(1,), dtype=torch.int32)
    needed, held = scratch_size(tokens, guesses, experts), len(copies["scratch"])
    if held < needed:
        raise ValueError(f"{tokens} tokens with {guesses} guesses need scratch of {needed}, but {held} are held")
    width = experts_width(experts)
    start(
        name_ahead_kernel,
        (1,),
        (ids, scores, rows, *(table[name] for name in _OF_TABLE), copies["spans"], copies["scratch"], layer),
        {
            "EXPERTS": experts,
            "GUESSES": guesses,
            "COUNTERS": table["counters"].shape[1],
            "MOST": len(copies["spans"]),
            "WIDTH": width,
            "CHUNK": min(width, ELEMENTS_AT_ONCE // width),
        },
        {"num_warps": WARPS},
    )


def fetch_ahead(copies: Mapping[str, Tensor], *, start: Start = run_kernel) -> None:
    """Copy every span, in one launch.

    Args:
        copies: the tensors of Copies, by name; addresses and bytes are multiples of 16.
        start: launch, or only compile.
    """
    spans = copies["spans"]
    start(fetch_ahead_kernel, (_PROGRAMS, len(spans)), (spans,), {"PROGRAMS": _PROGRAMS}, {"num_warps": WARPS})


_ANY_ALIGNMENT = ["ids", "scores", "rows", *_OF_TABLE, "spans", "scratch"]


@triton.jit(do_not_specialize_on_alignment=_ANY_ALIGNMENT, do_not_specialize=["layer"])
def name_ahead_kernel(
    ids,
    scores,
    rows,
    tier,
    reuse_high,
    critical,
    threshold,
    bits,
    offsets,
    pool,
    slot_bytes,
    source,
    ahead,
    most_ahead,
    staged,
    staged_for,
    counters,
    spans,
    scratch,
    layer: tl.int32,
    EXPERTS: tl.constexpr,
    GUESSES: tl.constexpr,
    COUNTERS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """See ``name_ahead`` and, for every tensor, Table and Copies; grid [1].

    Args:
        scratch: int32 [3 * WIDTH + tokens * GUESSES], contents do not matter.
        EXPERTS: of a layer.
        GUESSES: about a token.
        COUNTERS: columns.
        MOST: spans.
        WIDTH: a power of two, at least EXPERTS.
        CHUNK: guesses at a time, a power of two.
    """
    expert = tl.arange(0, WIDTH)
    half = layer % 2
    sizes, sums = count_pairs(ids, scores, scratch + 3 * WIDTH, tl.load(rows) * GUESSES, expert, EXPERTS, WIDTH, CHUNK)
    active = sizes > 0
    wanted = tiers_of(active, sums, threshold, critical + layer * (EXPERTS + 1), scratch, expert, WIDTH, CHUNK)
    width = tl.where(wanted == 2, tl.load(bits + 2), tl.load(bits + 1))
    held = tl.load(tier + layer * EXPERTS + expert, mask=expert < EXPERTS, other=0).to(tl.int32)
    hit = tl.where(tl.load(reuse_high) != 0, held >= wanted, held == wanted)
    missing = active & ((width != 0) & (hit == 0))
    limit = tl.load(most_ahead)
    counts = counters + layer * COUNTERS
    high = tl.load(ahead + 5)
    low = tl.load(ahead + 3)
    taken_high = 0
    taken_low = 0
    slot = tl.zeros([WIDTH], tl.int32)
    projections = tl.zeros([WIDTH], tl.int32)
    for number in range(MOST):
        part = tl.minimum(limit - 3 * number, 3)
        left = missing & tl.where(wanted == 2, taken_high < high, taken_low < low)
        most = tl.max(tl.where(left, sums, -1), 0)
        one = tl.min(tl.where(left & (sums == most), expert, WIDTH), 0)
        if (one < WIDTH) & (part > 0):
            missing = missing & (expert != one)
            code = tl.sum(tl.where(expert == one, wanted, 0), 0)
            is_high = (code == 2).to(tl.int32)
            taken = tl.where(code == 2, half * high + taken_high, half * low + taken_low)
            place = tl.load(ahead + 2 * code) + taken
            taken_high += is_high
            taken_low += 1 - is_high
            slot = tl.where(expert == one, place, slot)
            projections = tl.where(expert == one, part, projections)
            nbytes = bytes_ahead(offsets, slot_bytes, code, part)
            tl.store(spans + 3 * number, tl.load(source + (layer * EXPERTS + one).to(tl.int64) * 3 + code))
            tl.store(spans + 3 * number + 1, tl.load(pool + code) + place * tl.load(slot_bytes + code))
            tl.store(spans + 3 * number + 2, nbytes)
            add_to(counts, 11, 1)
            add_to(counts, 12, nbytes)
        else:
            for column in tl.static_range(3):
                tl.store(spans + 3 * number + column, 0)
    at = staged + half * 3 * EXPERTS + expert
    tl.store(at, slot, mask=expert < EXPERTS)
    tl.store(at + EXPERTS, tl.where(projections > 0, wanted, 0), mask=expert < EXPERTS)
    tl.store(at + 2 * EXPERTS, projections, mask=expert < EXPERTS)
    tl.store(staged_for + half, layer)


@triton.jit(do_not_specialize_on_alignment=["spans"])
def fetch_ahead_kernel(spans, PROGRAMS: tl.constexpr):
    """Copy spans[:, 2] bytes from spans[:, 0] to spans[:, 1]; grid [PROGRAMS, spans]."""
    span = spans + 3 * tl.program_id(1)
    source = tl.multiple_of(tl.load(span).to(tl.pointer_type(tl.int32)), 16)
    destination = tl.multiple_of(tl.load(span + 1).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of((tl.load(span + 2) // 4).to(tl.int32), 4)
    for first in range(tl.program_id(0) * _WORDS, words, PROGRAMS * _WORDS):
        offset = first + tl.arange(0, _WORDS)
        inside = offset < words
        tl.store(destination + offset, tl.load(source + offset, mask=inside), mask=inside)
