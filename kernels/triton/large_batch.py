"""The launches around a large-batch step's products; all of them without the host.

They count, write lists of groups, and place pairs.

Plain twin, bit for bit: ``vllm_dymoe.planner.large_batch``, which explains groups. Names are those of ``Table``,
``LayerPlan`` and ``LargeBatchWork``. Pairs are counted in parallel chunks, and the program that plans any step adds
them up; then one program per list writes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue, ask, take_sources
from vllm_dymoe.kernels.triton.planner import (
    add_to,
    check_global_ids,
    choose_on_gpu,
    count_pairs,
    ids_of,
    number_of,
    outside_of,
    plan_small_batch_on_gpu,
    program_of,
    row_of,
    tell_outside,
    weights_of,
)
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import experts_width
from vllm_dymoe.planner.hotness import usable
from vllm_dymoe.planner.large_batch import LargeBatchShape

_OF_TABLE = "precision", "staged", "staged_for", "staging", "offsets", "pool", "slot_bytes", "source", "counters"
_OF_PLAN = "count", "experts", "precisions", "slots", "action", "addresses", "work", "scratch"


def plan_large_batch_on_gpu(
    table: Mapping[str, Tensor], layer: int, ids: Tensor, weights: Tensor, rows: Tensor, plan: Mapping[str, Tensor],
    shape: LargeBatchShape, half: int, ahead: int, steps: Sequence[int], large: Mapping[str, Tensor],
    parts: Tensor | None = None, disk_queue: DeviceQueue | None = None, *, global_ids: Tensor | None = None,
    start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run both planners of a large batch on the device, in four launches.

    They are ``plan_small_batch`` and then ``plan_large_batch``. If precision is chosen among the experts of all ranks,
    two more launches do that first.

    Args:
        table: the tensors of a Table, by name.
        layer: index of the layer.
        ids: int32 or int64 [tokens, top_k].
        weights: float32 [tokens, top_k].
        rows: int32 [1], how many tokens are real.
        plan: the tensors of a LayerPlan of the shape, by name.
        shape: of the step.
        half: see ``plan_large_batch``.
        ahead: LOW, HIGH or 0, see ``plan_large_batch``.
        steps: most positions of an item in each class, two classes or more.
        large: the tensors of a LargeBatchWork, by name; its last class also has all larger experts.
        parts: see :func:`counted_parts`, if the shape has marks.
        disk_queue: brings what is missing into memory, before it is listed; None if all of it is there.
        global_ids: see ``plan_small_batch``.
        start: makes the launch.
    """
    width, scratch = experts_width(shape.experts), plan["scratch"]
    sizes = {"EXPERTS": shape.experts, "TOP_K": shape.top_k, "WIDTH": width}
    options = {"num_warps": program_of(width)[0]}
    check_global_ids(table, global_ids)
    if global_ids is not None:  # the only ones that marks matter for
        everything = replace(shape, experts=table["critical"].shape[1] - 1)
        counts = scratch.new_empty(everything.scratch)
        _count(global_ids if parts is None else parts, weights, rows, counts, everything, start)
        choose_on_gpu(
            table, layer, global_ids, ids, weights, rows, counts, chunks=shape.chunks, marked=parts is not None,
            start=start,
        )  # fmt: skip
        parts = None
    _count(ids if parts is None else parts, weights, rows, scratch, shape, start)
    marked = parts is not None
    plan_small_batch_on_gpu(table, layer, ids, weights, rows, plan, chunks=shape.chunks, marked=marked, start=start)
    if disk_queue is not None:
        ask(disk_queue, layer, plan, start=start)
        take_sources(disk_queue, table, layer, plan, start=start)
    classes, long = large["work"].shape[1:3]
    numbers = (
        layer, shape.half, shape.streamed_groups, half, ahead, shape.items, classes, long, plan["slots"].stride(0),
        plan["addresses"].stride(0),
    )  # fmt: skip
    columns = *(table[name] for name in _OF_TABLE), *(plan[name] for name in _OF_PLAN)
    constants = {"COUNTERS": table["counters"].shape[1], "SLICES": shape.slices, "STEPS": (shape.decoded, *steps)}
    start(
        list_kernel, (shape.groups, classes), (*columns, large["spans"], large["work"], *numbers),
        {"EXPERTS": shape.experts, "WIDTH": width, **constants, "GROUPS": shape.streamed_groups > 0}, options,
    )  # fmt: skip
    placed = (
        ids, weights, rows, scratch, plan["rows"], plan["pairs"], large["ids"], large["weights"], table["staged_for"],
        table["outside"], table["renormalizes"],
    )  # fmt: skip
    start(place_pairs_kernel, (shape.chunks,), (*placed, shape.chunk, shape.chunks, shape.positions, layer),
          sizes | {"ON_INPUT": shape.weights_on_input}, options)  # fmt: skip


def counted_parts(ids: Tensor, weights: Tensor, marks: Tensor) -> Tensor:
    """Return the experts of all tokens, of prompts' and of heavy hitters.

    The result is int [3, tokens, top_k], -1 for other tokens.

    Args:
        ids: int [tokens, top_k].
        weights: float32 [tokens, top_k].
        marks: int8 [tokens], see ``LargeBatches.forward``.
    """
    heavy = (marks[:, None] > 1) & usable(weights)
    return torch.stack((ids, torch.where(marks[:, None] > 0, ids, -1), torch.where(heavy, ids, -1)))


def _count(parts: Tensor, weights: Tensor, rows: Tensor, scratch: Tensor, shape: LargeBatchShape, start: Start) -> None:
    """Count the pairs of a step in one launch.

    Parts are int [tokens, top_k], or all :func:`counted_parts`.
    """
    width = experts_width(shape.experts)
    warps, at_once = program_of(width)
    start(
        count_kernel, (shape.chunks, len(parts) if parts.dim() > weights.dim() else 1),
        (parts, weights, rows, scratch, shape.chunk, shape.chunks, shape.positions, shape.counted),
        {"EXPERTS": shape.experts, "TOP_K": shape.top_k, "WIDTH": width, "CHUNK": at_once}, {"num_warps": warps},
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=["ids", "weights", "rows", "scratch"],
    do_not_specialize=["chunk", "chunks", "positions", "counted"],
)
def count_kernel(
    ids, weights, rows, scratch, chunk: tl.int32, chunks: tl.int32, positions: tl.int32, counted: tl.int32,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count each expert's positions and weights in a chunk of pairs.

    The pairs of each expert are numbered. Grid [chunks, parts]; the parts are all pairs, those of prompts, and those
    of heavy hitters.

    Args:
        ids: [parts, pairs].
        scratch: as in ``LargeBatchShape.scratch``: 3 * WIDTH for the planning program, sizes int32 [chunks, WIDTH],
            sums int64 [chunks, WIDTH], numbers int32 [pairs].
        chunk: pairs of a program.
        counted: elements of scratch for a part.
    """
    number = tl.program_id(0)
    at = number * chunk
    expert = tl.arange(0, WIDTH)
    part = tl.program_id(1)
    sizes_at = scratch + 3 * WIDTH + part * counted
    sums_at = (sizes_at + chunks * WIDTH).to(tl.pointer_type(tl.int64))
    ranks = sizes_at + 3 * chunks * WIDTH
    count = tl.minimum(tl.minimum(tl.load(rows) * TOP_K, positions) - at, chunk)
    of_part = ids + part * positions + at
    sizes, sums = count_pairs(of_part, weights + at, ranks + at, count, expert, EXPERTS, WIDTH, CHUNK)
    tl.store(sizes_at + number * WIDTH + expert, sizes)
    tl.store(sums_at + number * WIDTH + expert, sums)


@triton.jit(
    do_not_specialize_on_alignment=[*_OF_TABLE, *_OF_PLAN, "spans", "listed"],
    do_not_specialize=[
        "layer",
        "room",
        "passes",
        "half",
        "ahead",
        "most",
        "classes",
        "long",
        "apart",
        "addresses_apart",
    ],
)
def list_kernel(
    precision, staged, staged_for, staging, offsets, pool, slot_bytes, source, counters,
    count, experts, precisions, slots, action, addresses, work, scratch, spans, listed,
    layer: tl.int32, room: tl.int32, passes: tl.int32, half: tl.int32, ahead: tl.int32, most: tl.int32,
    classes: tl.int32, long: tl.int32, apart: tl.int32, addresses_apart: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, COUNTERS: tl.constexpr, SLICES: tl.constexpr, STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the lists of groups, copies and work.

    Grid [groups, classes], a list for each program. The first class also writes copies, and the second what is copied
    ahead.

    Args:
        room: staging slots of a group.
        ahead: see ``plan_large_batch_on_gpu``.
        most: most items.
        long: elements of a list.
        apart: items from one slice to the next.
        addresses_apart: numbers from one slice's addresses to the next one's.
        STEPS: positions of an item of the first class, then most positions of an expert in it and of an item in others.
        GROUPS: whether there is more than one group.
    """
    own_group = tl.program_id(0)
    own_class = tl.program_id(1)
    item = tl.arange(0, WIDTH)
    items = tl.load(count)
    used = item < items
    expert = tl.load(experts + item, mask=used, other=0)
    code = tl.load(precisions + item, mask=used, other=1)
    first = tl.load(work + 3 * item + 1, mask=used, other=0)
    length = tl.load(work + 3 * item + 2, mask=used, other=0) - first
    keeping = item < 0  # none
    passing = keeping
    for number in tl.static_range(SLICES):
        actions = tl.load(action + number * apart + item, mask=used, other=0)
        keeping = keeping | (actions == 1)
        passing = passing | (actions == 2)
    found = item < 0  # none
    found_slot = item
    if SLICES == 1:
        at = staged + layer % 2 * 3 * EXPERTS + expert
        found_slot = tl.load(at, mask=used, other=0)
        found = (tl.load(at + EXPERTS, mask=used, other=0) == code) & (tl.load(staged_for + layer % 2) == layer)
        found = used & (found & (tl.load(at + 2 * EXPERTS, mask=used, other=0) == 3))
        passing = passing & (found == 0)
    rank = tl.cumsum(passing.to(tl.int32), 0) - 1
    passing = passing & (rank < passes * room)
    keeping = keeping & (passing == 0)
    kept_rank = tl.cumsum(keeping.to(tl.int32), 0) - 1
    each = tl.maximum(room, 1)
    which = tl.where(passing, 2 + rank // each, 0)
    if GROUPS:
        which = tl.where(keeping, 1, which)

    kind = tl.where(length > STEPS[1], 1, 0)
    step = STEPS[0]
    for middle in tl.static_range(1, len(STEPS) - 1):
        if middle < len(STEPS) - 2:
            kind += tl.where(length > STEPS[middle + 1], 1, 0)
        step = tl.where(own_class == middle, STEPS[middle + 1], step)
    kind = tl.minimum(kind, classes - 1)
    few = tl.where(kind == 0, length, 0)
    many = length - few
    begin = tl.where(kind == 0, tl.cumsum(few, 0) - few, tl.sum(few, 0) + tl.cumsum(many, 0) - many)

    those = used & ((which == own_group) & (kind == own_class))
    pieces = tl.where(those, (length + step - 1) // step, 0)
    at = tl.cumsum(pieces, 0) - pieces
    total = tl.sum(pieces, 0)
    out = listed + 3 * long * (own_group * classes + own_class)
    for piece in range(tl.max(pieces, 0)):
        inside = those & (piece < pieces)
        to = out + 3 * (at + piece)
        tl.store(to, item, mask=inside)
        tl.store(to + 1, begin + piece * step, mask=inside)
        tl.store(to + 2, tl.minimum(begin + (piece + 1) * step, begin + length), mask=inside)
    _fill(out, most, total, long, item, WIDTH)

    if (own_group == 0) & (own_class == 0):
        tl.store(scratch + item, -1)
        _fill(spans, 0, 0, SLICES * (most + passes * room), item, WIDTH)
        tl.debug_barrier()
        tl.store(scratch + expert, begin, mask=used)
        place = (half + rank // each) % 2 * room + rank % each
        span = SLICES * tl.where(passing, most + rank, kept_rank)
        for number in tl.static_range(SLICES):
            part = item * 0 + (number + 1) if SLICES > 1 else code
            actions = tl.load(action + number * apart + item, mask=used, other=0)
            passes_here = passing & (actions == 2)
            copied = passes_here | ((actions == 1) & (passing | keeping))
            own = tl.load(slots + number * apart + item, mask=used, other=0)
            slot = tl.where(passes_here, tl.load(staging + 2 * part) + place, own)
            row = (layer * EXPERTS + expert).to(tl.int64) * 3
            nbytes, base = tl.load(slot_bytes + part), tl.load(pool + part)
            begins = tl.load(source + row + part, mask=used, other=0)
            begins = tl.where(found, base + found_slot * nbytes, begins)
            slot_at = base + slot * nbytes
            _list_copy(spans + 3 * (span + number), begins, slot_at, nbytes, copied)
            for column in tl.static_range(3):
                address = addresses + number * addresses_apart + 3 * item + column
                tl.store(address, slot_at + tl.load(offsets + 3 * part + column), mask=copied)
    if (ahead > 0) & ((own_group == 0) & (own_class == 1)):
        known = item < EXPERTS
        next_row = (layer + 1) * EXPERTS + item
        absent = tl.load(precision + next_row, mask=known, other=1).to(tl.int32) == 0
        next_place = tl.cumsum(absent.to(tl.int32), 0) - 1
        chosen = absent & (next_place < tl.where(items > 0, room, 0))
        bytes_next, base_next = tl.load(slot_bytes + ahead), tl.load(pool + ahead)
        next_slot = tl.load(staging + 2 * ahead) + (half + passes) % 2 * room + next_place
        of_next = staged + (layer + 1) % 2 * 3 * EXPERTS + item
        tl.store(of_next, tl.where(chosen, next_slot, 0), mask=known)
        tl.store(of_next + EXPERTS, tl.where(chosen, ahead, 0), mask=known)
        tl.store(of_next + 2 * EXPERTS, tl.where(chosen, 3, 0), mask=known)
        tl.store(staged_for + (layer + 1) % 2, layer + 1)
        next_begins = tl.load(source + next_row.to(tl.int64) * 3 + ahead, mask=chosen, other=0)
        listed_next = spans + 3 * (most + passes * room)
        _list_copy(listed_next + 3 * next_place, next_begins, base_next + next_slot * bytes_next, bytes_next, chosen)
        named = number_of(chosen)
        _fill(listed_next, 0, named, room, item, WIDTH)
        add_to(counters + (layer + 1) * COUNTERS, 11, named)
        add_to(counters + (layer + 1) * COUNTERS, 12, named * bytes_next)


@triton.jit
def _list_copy(span, begin, to, nbytes, copied):
    tl.store(span, begin, mask=copied)
    tl.store(span + 1, to, mask=copied)
    tl.store(span + 2, nbytes, mask=copied)


@triton.jit
def _fill(rows, value, first, stop, lane, WIDTH: tl.constexpr):
    """Set rows from the first one on to (value, 0, 0)."""
    for at in range(first // WIDTH * WIDTH, stop, WIDTH):
        inside = (at + lane >= first) & (at + lane < stop)
        _list_copy(rows + 3 * (at + lane), value, 0, 0, inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "ids",
        "weights",
        "rows",
        "scratch",
        "item_rows",
        "item_pairs",
        "computed",
        "computed_weights",
        "staged_for",
        "outside",
        "renormalizes",
    ],
    do_not_specialize=["chunk", "chunks", "positions", "layer"],
)
def place_pairs_kernel(
    ids, weights, rows, scratch, item_rows, item_pairs, computed, computed_weights, staged_for, outside, renormalizes,
    chunk: tl.int32, chunks: tl.int32, positions: tl.int32, layer: tl.int32,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, ON_INPUT: tl.constexpr,
):  # fmt: skip
    """Write the position of every pair, and the experts of pairs that have one.

    Grid [chunks].

    Args:
        computed: int32 [pairs], experts, -1 for a pair that is not computed.
        computed_weights: float32 [pairs], see ``weights_of``.
    """
    number = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    before = scratch + 3 * WIDTH + number * WIDTH
    ranks = scratch + (3 + 3 * chunks) * WIDTH
    real = tl.minimum(tl.load(rows) * TOP_K, positions)
    wrong = tl.full([WIDTH], -1, tl.int64)
    for first in range(number * chunk, tl.minimum((number + 1) * chunk, positions), WIDTH):
        pair = first + lane
        own = pair < tl.minimum((number + 1) * chunk, positions)
        one_id, inside = ids_of(ids, pair, tl.where(own, real, 0), EXPERTS)
        begin = tl.load(scratch + one_id, mask=inside, other=-1)
        inside = inside & (begin >= 0)
        position = begin + tl.load(before + one_id, mask=inside, other=0) + tl.load(ranks + pair, mask=inside, other=0)
        tl.store(item_pairs + position, pair, mask=inside)
        tl.store(item_rows + position, row_of(pair, TOP_K, ON_INPUT), mask=inside)
        tl.store(computed + pair, tl.where(inside, one_id, -1), mask=own)
        weight = weights_of(weights, ids, scratch, pair, real, renormalizes, EXPERTS, TOP_K, ON_INPUT)
        tl.store(computed_weights + pair, weight, mask=own)
        wrong = tl.maximum(wrong, outside_of(ids, pair, tl.where(own, real, 0), EXPERTS))
    tell_outside(outside + layer, wrong)
    if number == 0:
        tl.store(staged_for + layer % 2, -1)
