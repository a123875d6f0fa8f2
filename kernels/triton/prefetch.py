"""Prefetch on the device: names, judges, lists and copies predicted experts while a layer is computed.

Plain twins, bit for bit: ``vllm_dymoe.planner.prefetch``. Names are those of ``Table`` and ``PrefetchList``.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels.triton.planner import ELEMENTS_AT_ONCE, WARPS, add_to, bytes_ahead, number_of
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import experts_width
from vllm_dymoe.planner.prefetch import MOST_SCORE, NAMED, UNITS

# Each has 8 KiB on its way, and a PCIe link of 50 GB/s with 2 us of latency needs 100 KB. They stop within as much.
_PROGRAMS = 32
_WORDS = tl.constexpr(2048)  # int32, of a program at a time
_NAMED, _UNITS, _MOST_SCORE = tl.constexpr(NAMED), tl.constexpr(float(UNITS)), tl.constexpr(float(MOST_SCORE))

_LISTED_BY = (
    "predicted", "precision", "staging", "prefetch_slots", "staged", "staged_for", "offsets", "pool", "slot_bytes",
    "source",
)  # fmt: skip


def name_experts_on_gpu(
    table: Mapping[str, Tensor], target: int, layer: int, scores: Tensor, rows: Tensor, asked: Tensor, numbers: Tensor,
    scratch: Tensor, *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Do what ``name_experts`` does, in one launch.

    Args:
        table: the tensors of a Table, by name.
        scores: float32 [voters, tokens, experts of all ranks], contiguous.
        scratch: int64 [at least the width of all ranks' experts], contents do not matter.
    """
    (layers, experts), (voters, tokens, everyone) = table["precision"].shape, scores.shape
    width = experts_width(everyone)
    check_tensor("scratch", scratch, shape=(None,))
    columns = scores, rows, asked, numbers, table["fetched_ahead"], table["predicted"], scratch
    sizes = {"EXPERTS": experts, "EVERYONE": everyone, "VOTERS": voters, "WIDTH": width}
    sizes["CHUNK"] = min(width, ELEMENTS_AT_ONCE // width)
    start(name_experts_kernel, (1,), (*columns, layer, target, layers, tokens), sizes, {"num_warps": WARPS})


def judge_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, ids: Tensor, rows: Tensor, listed: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Do what ``judge_predicted`` does, in one launch; arguments as there, with tensors by name."""
    experts = table["precision"].shape[1]
    columns = ids, rows, table["predicted"], listed["held"], listed["counts"], listed["scratch"]
    sizes = {"EXPERTS": experts, "WIDTH": experts_width(experts), "TOP_K": ids.shape[1]}
    sizes["COUNTS"] = listed["counts"].shape[1]
    start(judge_predicted_kernel, (1,), (*columns, layer), sizes, {"num_warps": WARPS})


def list_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, rows: Tensor, projections: int, out: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Do what ``list_predicted`` does, in one launch.

    Args:
        table: the tensors of a Table, by name.
        layer: index of the layer in the table.
        rows: int32 [1], number of real tokens.
        projections: how many of an expert are copied.
        out: the tensors of a PrefetchList, by name; rows of copies after the last one keep their values.
    """
    layers, experts = table["precision"].shape
    columns = *(table[name] for name in _LISTED_BY), out["copies"], out["count"], out["arrivals"], out["held"]
    sizes = {"EXPERTS": experts, "WIDTH": experts_width(experts), "SLICES": table["staged"].shape[1]}
    start(list_predicted_kernel, (1,), (rows, *columns, layer, layers, projections), sizes, {"num_warps": WARPS})


def copy_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, projections: int, listed: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Make the listed copies in one launch, until the plan of ``layer`` begins; each is published when complete.

    A program is one warp, so that all of its lanes see the same value where it asks whether to go on.
    """
    columns = listed["copies"], listed["count"], listed["arrivals"], table["planned"], table["staged"]
    half = table["staged"].shape[1] * 3 * table["precision"].shape[1]
    sizes = {"HALF": half, "PROGRAMS": _PROGRAMS}
    start(copy_predicted_kernel, (_PROGRAMS,), (*columns, layer, projections), sizes, {"num_warps": 1})


@triton.jit(
    do_not_specialize_on_alignment=["scores", "rows", "asked", "numbers", "fetched_ahead", "predicted", "scratch"],
    do_not_specialize=["layer", "target", "layers", "tokens"],
)
def name_experts_kernel(
    scores, rows, asked, numbers, fetched_ahead, predicted, scratch,
    layer: tl.int32, target: tl.int32, layers: tl.int32, tokens: tl.int32,
    EXPERTS: tl.constexpr, EVERYONE: tl.constexpr, VOTERS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid [1]; WIDTH is a power of two, at least EVERYONE."""
    expert = tl.arange(0, WIDTH)
    known = expert < EVERYONE
    most = tl.load(asked + 2 * target)
    voting = tl.minimum(tl.minimum(tl.load(asked + 2 * target + 1), layer + 1), VOTERS)
    tally = tl.zeros([WIDTH], tl.int64)
    for token in range(tl.load(rows)):
        chosen = known
        for voter in range(voting):
            of = scores + ((layer - voter + VOTERS) % VOTERS * tokens + token) * EVERYONE
            own = _no_nan(tl.load(of + expert, mask=known, other=-float("inf")))
            place = tl.zeros([WIDTH], tl.int32)
            for first in range(0, WIDTH, CHUNK):
                other = first + tl.arange(0, CHUNK)
                others = _no_nan(tl.load(of + other, mask=other < EVERYONE, other=-float("inf")))[:, None]
                better = (others > own[None, :]) | ((others == own[None, :]) & (other[:, None] < expert[None, :]))
                place += tl.sum(better.to(tl.int32), 0)
            chosen = chosen & ((place < most) & (own > -float("inf")))
        of = scores + (layer % VOTERS * tokens + token) * EVERYONE
        score = _no_nan(tl.load(of + expert, mask=known, other=-float("inf")))
        score = tl.minimum(tl.maximum(score, -_MOST_SCORE), _MOST_SCORE) * _UNITS
        tally += tl.where(chosen, _NAMED + score.to(tl.int64), 0)
    number = tl.load(numbers + target * EVERYONE + expert, mask=known, other=-1)
    tally = tl.where(number >= 0, tally, 0)
    tl.store(scratch + expert, tally)
    of_target = predicted + target * EXPERTS
    tl.store(of_target + expert, -1, mask=expert < EXPERTS)
    tl.debug_barrier()
    place = tl.zeros([WIDTH], tl.int32)
    for first in range(0, WIDTH, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others = tl.load(scratch + other)[:, None]
        better = (others > tally[None, :]) | ((others == tally[None, :]) & (other[:, None] < expert[None, :]))
        place += tl.sum(better.to(tl.int32), 0)
    named = tally > 0
    counts = fetched_ahead + target * (EXPERTS + 1) + number_of(named)
    high, fetched = tl.load(counts), tl.load(counts + layers * (EXPERTS + 1))
    tl.store(of_target + place, number, mask=named & (place < fetched))
    tl.store(of_target + layers * EXPERTS + expert, tl.where(expert < high, 2, 1), mask=expert < EXPERTS)


@triton.jit
def _no_nan(score):
    return tl.where(score == score, score, -float("inf"))


@triton.jit(
    do_not_specialize_on_alignment=["ids", "rows", "predicted", "held", "counts", "scratch"],
    do_not_specialize=["layer"],
)
def judge_predicted_kernel(
    ids, rows, predicted, held, counts, scratch, layer: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Grid [1]; of scratch two numbers for each expert are used."""
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    pairs = tl.load(rows) * TOP_K
    if pairs > 0:
        marks = scratch.to(tl.pointer_type(tl.int32))
        tl.store(marks + expert, 0)
        tl.store(marks + WIDTH + expert, 0)
        tl.debug_barrier()
        for first in range(0, pairs, WIDTH):
            one_id = tl.load(ids + first + expert, mask=first + expert < pairs, other=-1)
            inside = (one_id >= 0) & (one_id < EXPERTS)
            tl.store(marks + tl.where(inside, one_id, 0), 1, mask=inside)
        name = tl.load(predicted + layer * EXPERTS + expert, mask=known, other=-1)
        ended = tl.cumsum((name < 0).to(tl.int32), 0)
        tl.store(marks + WIDTH + tl.where(ended == 0, name, 0), 1, mask=ended == 0)
        tl.debug_barrier()
        chosen = known & (tl.load(marks + expert) > 0)
        named = known & (tl.load(marks + WIDTH + expert) > 0)
        here = tl.load(held + layer % 2 * EXPERTS + expert, mask=known, other=0) > 0
        of_layer = counts + layer * COUNTS
        add_to(of_layer, 0, 1)
        add_to(of_layer, 1, number_of(named))
        add_to(of_layer, 2, number_of(chosen))
        add_to(of_layer, 3, number_of(named & chosen))
        add_to(of_layer, 4, number_of(chosen & here))
        add_to(of_layer, 5, number_of(named & ((here == 0) & (chosen == 0))))


@triton.jit(
    do_not_specialize_on_alignment=["rows", *_LISTED_BY, "copies", "count", "arrivals", "held"],
    do_not_specialize=["layer", "layers", "projections"],
)
def list_predicted_kernel(
    rows, predicted, precision, staging, prefetch_slots, staged, staged_for, offsets, pool, slot_bytes, source,
    copies, count, arrivals, held, layer: tl.int32, layers: tl.int32, projections: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Grid [1]; WIDTH is a power of two, at least EXPERTS."""
    number = tl.arange(0, WIDTH)
    known = number < EXPERTS
    of_layer = layer * EXPERTS + number
    expert = tl.load(predicted + of_layer, mask=known, other=-1)
    code = tl.load(predicted + layers * EXPERTS + of_layer, mask=known, other=0)
    ended = tl.cumsum((expert < 0).to(tl.int32), 0)
    named = (known & (ended == 0)) & (expert < tl.where(tl.load(rows) > 0, EXPERTS, 0))
    version = tl.load(precision + layer * EXPERTS + expert, mask=named, other=2).to(tl.int32)
    if SLICES > 1:
        low = named & ((code == 1) | (code == 2)) & (version < 1)
        high = named & (code == 2) & (version < 2)
    else:
        low = named & (code == 1) & (version == 0)
        high = named & (code == 2) & (version == 0)
    low_place = tl.cumsum(low.to(tl.int32), 0) - 1
    high_place = tl.cumsum(high.to(tl.int32), 0) - 1
    low = low & (low_place < tl.load(prefetch_slots + 1))
    high = high & (high_place < tl.load(prefetch_slots + 2))

    half = staged + layer % 2 * (SLICES * 3 * EXPERTS)
    for column in tl.static_range(3 * SLICES):
        tl.store(half + column * EXPERTS + number, 0, mask=known)
    for slice_number in tl.static_range(SLICES):
        tl.store(arrivals + slice_number * EXPERTS + number, 0, mask=known)
    here = tl.load(precision + layer * EXPERTS + number, mask=known, other=0).to(tl.int32)
    tl.store(held + layer % 2 * EXPERTS + number, (here > 0).to(tl.int32), mask=known)
    tl.debug_barrier()
    tl.store(staged_for + layer % 2, layer)
    each = low.to(tl.int32) + high.to(tl.int32)
    place = tl.cumsum(each, 0) - each
    row = source + (layer * EXPERTS + expert).to(tl.int64) * 3
    _list_copies(
        copies, place, low, low_place, half, 0, row, 1, expert, staging, pool, slot_bytes, offsets, projections, EXPERTS
    )
    _list_copies(
        copies, place + low.to(tl.int32), high, high_place, half, SLICES - 1, row, 2, expert, staging, pool, slot_bytes,
        offsets, projections, EXPERTS,
    )  # fmt: skip
    tl.store(count, tl.sum(each, 0))


@triton.jit
def _list_copies(
    copies, place, those, slot_place, half, slice_number, row, code, expert, staging, pool, slot_bytes, offsets,
    projections, EXPERTS: tl.constexpr,
):  # fmt: skip
    """List the copies of one version or slice, at their places in the list and in staging slots."""
    slot = tl.load(staging + 2 * code) + slot_place
    at = half + slice_number * 3 * EXPERTS + expert
    tl.store(at, slot, mask=those)
    tl.store(at + EXPERTS, code, mask=those)
    nbytes = tl.load(slot_bytes + code)
    copy = copies + 4 * place
    tl.store(copy, tl.load(row + code, mask=those, other=0), mask=those)
    tl.store(copy + 1, tl.load(pool + code) + slot * nbytes, mask=those)
    tl.store(copy + 2, expert * 0 + bytes_ahead(offsets, slot_bytes, code, projections), mask=those)
    tl.store(copy + 3, ((3 * slice_number + 2) * EXPERTS + expert).to(tl.int64), mask=those)


@triton.jit(
    do_not_specialize_on_alignment=["copies", "count", "arrivals", "planned", "staged"],
    do_not_specialize=["layer", "projections"],
)
def copy_predicted_kernel(
    copies, count, arrivals, planned, staged, layer: tl.int32, projections: tl.int32,
    HALF: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy parts of 8 KiB, each program its own; the last program of a copy publishes it. Grid [PROGRAMS]."""
    listed = tl.load(count)
    number = tl.program_id(0) * 0
    going = tl.load(planned, volatile=True) != layer
    while (number < listed) & going:
        copy = copies + 4 * number
        source = tl.multiple_of(tl.load(copy).to(tl.pointer_type(tl.int32)), 16)
        destination = tl.multiple_of(tl.load(copy + 1).to(tl.pointer_type(tl.int32)), 16)
        words = tl.multiple_of((tl.load(copy + 2) // 4).to(tl.int32), 4)
        first = tl.program_id(0) * _WORDS
        while (first < words) & going:
            offset = first + tl.arange(0, _WORDS)
            inside = offset < words
            tl.store(destination + offset, tl.load(source + offset, mask=inside), mask=inside)
            first += PROGRAMS * _WORDS
            going = tl.load(planned, volatile=True) != layer
        if first >= words:
            tl.debug_barrier()
            before = tl.atomic_add(arrivals + number, 1, sem="acq_rel", scope="gpu")
            if before == PROGRAMS - 1:
                place = tl.load(copy + 3)
                tl.atomic_xchg(staged + layer % 2 * HALF + place, projections, sem="release", scope="gpu")
        number += 1
