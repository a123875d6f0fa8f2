"""Prefetch on the device, while a layer is computed.

It names, judges, lists and copies predicted experts. Plain twins, bit for bit: ``vllm_dymoe.planner.prefetch``. Names
are those of ``Table`` and ``PrefetchList``.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels.triton.planner import add_to, bytes_ahead, number_of, program_of
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import experts_width
from vllm_dymoe.planner.prefetch import MOST_SCORE, NAMED, UNITS

# Each program has 8 KiB in flight, and a PCIe link of 50 GB/s with 2 us of latency needs 100 KB. They stop within that
# many bytes.
_PROGRAMS = 32
_WORDS = tl.constexpr(2048)  # int32 words that a program copies at a time
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
    warps, at_once = program_of(width)
    sizes = {"EXPERTS": experts, "EVERYONE": everyone, "VOTERS": voters, "WIDTH": width, "CHUNK": at_once}
    start(name_experts_kernel, (1,), (*columns, layer, target, layers, tokens), sizes, {"num_warps": warps})


def judge_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, ids: Tensor, rows: Tensor, listed: Mapping[str, Tensor],
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Do what ``judge_predicted`` does, in one launch.

    Arguments are as there, with tensors by name.
    """
    experts = table["precision"].shape[1]
    columns = ids, rows, table["predicted"], listed["held"], listed["counts"], listed["scratch"]
    width = experts_width(experts)
    sizes = {"EXPERTS": experts, "WIDTH": width, "TOP_K": ids.shape[1], "COUNTS": listed["counts"].shape[1]}
    start(judge_predicted_kernel, (1,), (*columns, layer, len(ids)), sizes, {"num_warps": program_of(width)[0]})


def list_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, rows: Tensor, projections: int, out: Mapping[str, Tensor],
    look_ahead: int = 1, *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``list_predicted`` on the device, in one launch.

    Args:
        table: the tensors of a Table, by name, as ``Table.at`` gives them for the layer.
        layer: index of the layer in the table.
        rows: int32 [1], number of real tokens.
        projections: how many projections of an expert are copied.
        out: the tensors of a PrefetchList, by name; rows of copies after the last one keep their values.
        look_ahead: layers that copies are listed for.
    """
    layers, experts = table["precision"].shape
    columns = *(table[name] for name in _LISTED_BY), *(out[name] for name in ("copies", "count", "arrivals", "held"))
    columns += (out["scratch"],)
    width = experts_width(experts)
    sizes = {"EXPERTS": experts, "WIDTH": width, "SLICES": table["staged"].shape[1]}
    sizes |= {"AHEAD": look_ahead, "ARRIVALS": len(out["arrivals"])}
    options = {"num_warps": program_of(width)[0]}
    start(list_predicted_kernel, (1,), (rows, *columns, layer, layers, projections), sizes, options)


def copy_predicted_on_gpu(
    table: Mapping[str, Tensor], layer: int, listed: Mapping[str, Tensor], *, start: Start = run_kernel
) -> None:
    """Make the listed copies in one launch, until the plan of ``layer`` begins.

    Each is published when complete. A program is one warp, so that all of its lanes see the same value when it checks
    whether to continue.
    """
    columns = listed["copies"], listed["count"], listed["arrivals"], table["planned"], table["staged"]
    sizes = {"PROGRAMS": _PROGRAMS}
    start(copy_predicted_kernel, (_PROGRAMS,), (*columns, layer), sizes, {"num_warps": 1})


@triton.jit(
    do_not_specialize_on_alignment=["scores", "rows", "asked", "numbers", "fetched_ahead", "predicted", "scratch"],
    do_not_specialize=["layer", "target", "layers", "tokens"],
)
def name_experts_kernel(
    scores, rows, asked, numbers, fetched_ahead, predicted, scratch,
    layer: tl.int32, target: tl.int32, layers: tl.int32, tokens: tl.int32,
    EXPERTS: tl.constexpr, EVERYONE: tl.constexpr, VOTERS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Run ``name_experts``; grid [1].

    WIDTH is a power of two, at least EVERYONE.
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EVERYONE
    most = tl.load(asked + 2 * target)
    voting = tl.minimum(tl.minimum(tl.load(asked + 2 * target + 1), layer + 1), VOTERS)
    tally = tl.zeros([WIDTH], tl.int64)
    for token in range(tl.minimum(tl.load(rows), tokens)):
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
    do_not_specialize=["layer", "tokens"],
)
def judge_predicted_kernel(
    ids, rows, predicted, held, counts, scratch, layer: tl.int32, tokens: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Run ``judge_predicted``; grid [1].

    Of scratch two numbers for each expert are used.
    """
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    pairs = tl.minimum(tl.load(rows), tokens) * TOP_K
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
    do_not_specialize_on_alignment=["rows", *_LISTED_BY, "copies", "count", "arrivals", "held", "scratch"],
    do_not_specialize=["layer", "layers", "projections"],
)
def list_predicted_kernel(
    rows, predicted, precision, staging, prefetch_slots, staged, staged_for, offsets, pool, slot_bytes, source,
    copies, count, arrivals, held, scratch, layer: tl.int32, layers: tl.int32, projections: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, ARRIVALS: tl.constexpr,
):  # fmt: skip
    """Run ``list_predicted``; grid [1].

    WIDTH is a power of two, at least EXPERTS. Of scratch four numbers for each expert are used.
    """
    number = tl.arange(0, WIDTH)
    known = number < EXPERTS
    real = tl.load(rows)
    here = tl.load(precision + layer * EXPERTS + number, mask=known, other=0).to(tl.int32)
    for first in tl.static_range(0, ARRIVALS, WIDTH):
        tl.store(arrivals + first + number, 0, mask=first + number < ARRIVALS)
    tl.store(held + layer % 2 * EXPERTS + number, (here > 0).to(tl.int32), mask=known)
    stays = tl.load(staged_for + layer % 2) == layer
    low_free, high_free = tl.load(prefetch_slots + 1), tl.load(prefetch_slots + 2)
    order = scratch.to(tl.pointer_type(tl.int32))
    if AHEAD > 1:
        low_free = _list_free(
            order, staged, layer, 0, 1, stays, low_free, staging, number, known, EXPERTS, WIDTH, SLICES
        )
        high_free = _list_free(
            order + 2 * WIDTH, staged, layer, SLICES - 1, 2, stays, high_free, staging, number, known, EXPERTS, WIDTH,
            SLICES,
        )  # fmt: skip
    listed = real * 0
    low_taken = listed
    high_taken = listed
    for ahead in tl.static_range(AHEAD):
        later = layer + ahead
        within = later < layers
        if ahead > 0:  # a slot of another size is another place
            after = slot_bytes + 3 * (tl.minimum(later, layers - 1) - layer)
            for code_number in tl.static_range(1, 3):
                within = within & (tl.load(after + code_number) == tl.load(slot_bytes + code_number))
        if within:
            half = staged + later % 2 * (SLICES * 3 * EXPERTS)
            for slice_number in tl.static_range(SLICES):
                at = half + slice_number * 3 * EXPERTS + number
                arrived = known & (number < 0)
                if AHEAD > 1:
                    if ahead == 0:
                        arrived = known & (tl.where(stays, tl.load(at + 2 * EXPERTS, mask=known, other=0), 0) > 0)
                for column in tl.static_range(3):
                    tl.store(at + column * EXPERTS, 0, mask=known & (arrived == 0))
            tl.debug_barrier()
            tl.store(staged_for + later % 2, later)
            of_layer = later * EXPERTS + number
            expert = tl.load(predicted + of_layer, mask=known, other=-1)
            code = tl.load(predicted + layers * EXPERTS + of_layer, mask=known, other=0)
            ended = tl.cumsum((expert < 0).to(tl.int32), 0)
            named = (known & (ended == 0)) & (expert < tl.where(real > 0, EXPERTS, 0))
            version = tl.load(precision + later * EXPERTS + expert, mask=named, other=2).to(tl.int32)
            if SLICES > 1:
                low = named & (((code == 1) | (code == 2)) & (version < 1))
                high = named & ((code == 2) & (version < 2))
            else:
                low = named & ((code == 1) & (version == 0))
                high = named & ((code == 2) & (version == 0))
            if AHEAD > 1:
                if ahead == 0:
                    low = low & (tl.load(half + 2 * EXPERTS + expert, mask=low, other=0) == 0)
                    residual = half + (SLICES - 1) * 3 * EXPERTS
                    high = high & (tl.load(residual + 2 * EXPERTS + expert, mask=high, other=0) == 0)
            low_place = low_taken + tl.cumsum(low.to(tl.int32), 0) - 1
            high_place = high_taken + tl.cumsum(high.to(tl.int32), 0) - 1
            low = low & (low_place < low_free)
            high = high & (high_place < high_free)
            if AHEAD > 1:
                low_place = tl.load(order + low_place, mask=low, other=0)
                high_place = tl.load(order + 2 * WIDTH + high_place, mask=high, other=0)
            each = low.to(tl.int32) + high.to(tl.int32)
            place = listed + tl.cumsum(each, 0) - each
            row = source + (later * EXPERTS + expert).to(tl.int64) * 3
            at = later % 2 * SLICES
            _list_copies(
                copies, place, low, low_place, staged, at, row, 1, expert, staging + 6 * ahead, pool + 3 * ahead,
                slot_bytes + 3 * ahead, offsets + 9 * ahead, projections, EXPERTS,
            )  # fmt: skip
            _list_copies(
                copies, place + low.to(tl.int32), high, high_place, staged, at + SLICES - 1, row, 2, expert,
                staging + 6 * ahead, pool + 3 * ahead, slot_bytes + 3 * ahead, offsets + 9 * ahead, projections,
                EXPERTS,
            )  # fmt: skip
            listed += tl.sum(each, 0)
            low_taken += number_of(low)
            high_taken += number_of(high)
            tl.debug_barrier()
    tl.store(count, listed * projections)


@triton.jit
def _list_free(
    order, staged, layer, slice_number, code, stays, slots, staging, number, known,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """List the slots of a version that no prediction for the layer has.

    They are ascending, and are written to `order` [2 * WIDTH].

    Returns:
        how many.
    """
    at = staged + (layer % 2 * SLICES + slice_number) * 3 * EXPERTS + number
    kept = known & (tl.where(stays, tl.load(at + 2 * EXPERTS, mask=known, other=0), 0) > 0)
    kept = kept & (tl.load(at + EXPERTS, mask=known, other=0) == code)
    place = tl.load(at, mask=kept, other=0) - tl.load(staging + 2 * code)
    tl.store(order + WIDTH + number, 0)
    tl.debug_barrier()
    tl.store(order + WIDTH + place, 1, mask=kept & (place < WIDTH))
    tl.debug_barrier()
    free = (tl.load(order + WIDTH + number) == 0) & (number < slots)
    rank = tl.cumsum(free.to(tl.int32), 0) - 1
    tl.store(order + rank, number, mask=free)
    tl.debug_barrier()
    return number_of(free)


@triton.jit
def _list_copies(
    copies, place, those, slot_place, staged, slice_number, row, code, expert, staging, pool, slot_bytes, offsets,
    projections, EXPERTS: tl.constexpr,
):  # fmt: skip
    """List the copies of one version or slice, one for each projection."""
    slot = tl.load(staging + 2 * code) + slot_place
    at = slice_number * 3 * EXPERTS + expert
    tl.store(staged + at, slot, mask=those)
    tl.store(staged + at + EXPERTS, code, mask=those)
    begin = tl.load(row + code, mask=those, other=0)
    to = tl.load(pool + code) + slot * tl.load(slot_bytes + code)
    for projection in range(projections):
        first = bytes_ahead(offsets, slot_bytes, code, projection)
        copy = copies + 5 * (place * projections + projection)
        tl.store(copy, begin + first, mask=those)
        tl.store(copy + 1, to + first, mask=those)
        tl.store(copy + 2, expert * 0 + (bytes_ahead(offsets, slot_bytes, code, projection + 1) - first), mask=those)
        tl.store(copy + 3, (at + 2 * EXPERTS).to(tl.int64), mask=those)
        tl.store(copy + 4, (expert * 0 + projection + 1).to(tl.int64), mask=those)


@triton.jit(
    do_not_specialize_on_alignment=["copies", "count", "arrivals", "planned", "staged"],
    do_not_specialize=["layer"],
)
def copy_predicted_kernel(copies, count, arrivals, planned, staged, layer: tl.int32, PROGRAMS: tl.constexpr):
    """Copy parts of 8 KiB, each program its own.

    The last program of a copy publishes it. All make the copies in their order, so what has arrived of an expert only
    grows. Grid [PROGRAMS].
    """
    listed = tl.load(count)
    number = tl.program_id(0) * 0
    going = tl.load(planned, volatile=True) != layer
    while (number < listed) & going:
        copy = copies + 5 * number
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
                tl.atomic_max(staged + place, tl.load(copy + 4).to(tl.int32), sem="release", scope="gpu")
        number += 1
