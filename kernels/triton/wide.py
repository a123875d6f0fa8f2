"""What is launched around a wide step's products: counting, lists of groups, places of pairs; no host in any of it.

Plain twin, bit for bit: ``vllm_dymoe.residency.wide_rule``, which says what groups are. Names are those of ``Table``,
``Decision`` and ``WideWork``. Pairs are counted in chunks, side by side, and the program that decides any step adds
chunks up; another program for each list makes it, out of the same few numbers.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.kernels.triton.decide import (
    ELEMENTS_AT_ONCE,
    WARPS,
    add_to,
    count_pairs,
    decide,
    ids_of,
    number_of,
)
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.residency.constants import experts_width
from vllm_dymoe.residency.wide_rule import WideShape

_OF_TABLE = "staged", "staged_for", "staging", "offsets", "pool", "slot_bytes", "source"
_OF_DECISION = "count", "experts", "tiers", "slots", "fate", "addresses", "work", "scratch"


def plan_wide(
    table: Mapping[str, Tensor],
    layer: int,
    ids: Tensor,
    weights: Tensor,
    rows: Tensor,
    decision: Mapping[str, Tensor],
    shape: WideShape,
    half: int,
    steps: Sequence[int],
    wide: Mapping[str, Tensor],
    marks: Tensor | None = None,
    *,
    start: Start = run_kernel,
) -> None:
    """What ``decide_plain`` and then ``plan_wide_plain`` do, in four launches.

    Args:
        table: the tensors of a Table, by name.
        layer: which of its layers.
        ids: int32 or int64 [tokens, top_k].
        weights: float32 [tokens, top_k].
        rows: int32 [1], how many tokens are real.
        decision: the tensors of a Decision of the shape, by name.
        shape: of the step.
        half: 0 or 1, see ``plan_wide_plain``.
        steps: positions of an item of each class.
        wide: the tensors of a WideWork, by name.
        marks: int8 [tokens], of tokens of prompts, if the shape has them.
        start: launch, or only compile.
    """
    width, scratch = experts_width(shape.experts), decision["scratch"]
    sizes = {"EXPERTS": shape.experts, "TOP_K": shape.top_k, "WIDTH": width}
    options = {"num_warps": WARPS}
    chunks = {**sizes, "CHUNK": min(width, ELEMENTS_AT_ONCE // width)}
    parts = ids
    if marks is not None:
        parts = torch.stack((ids, *(torch.where(marks[:, None] >= least, ids, -1) for least in (1, 2))))
    counted = parts, weights, rows, scratch, shape.chunk, shape.chunks, shape.positions, shape.counted
    start(count_kernel, (shape.chunks, 3 if shape.marked else 1), counted, chunks, options)
    decide(table, layer, ids, weights, rows, decision, chunks=shape.chunks, marked=shape.marked, start=start)
    numbers = (
        layer, shape.half, shape.passes, half, shape.items, shape.positions, decision["slots"].stride(0),
        decision["addresses"].stride(0),
    )  # fmt: skip
    start(
        list_kernel,
        (shape.groups, len(steps)),
        (
            *(table[name] for name in _OF_TABLE), *(decision[name] for name in _OF_DECISION),
            wide["group"], wide["spans"], wide["work"], *numbers,
        ),
        {
            "EXPERTS": shape.experts, "WIDTH": width, "NESTED": shape.slices > 1, "CLASSES": len(steps),
            "DECODED": steps[0], "LAST": steps[-1], "MIDDLE": tuple(steps[1:-1]), "GROUPS": shape.passes > 0,
        },
        options,
    )  # fmt: skip
    placed = ids, rows, scratch, decision["rows"], decision["pairs"], wide["ids"], table["staged_for"]
    start(place_pairs_kernel, (shape.chunks,), (*placed, shape.chunk, shape.chunks, shape.positions, layer), sizes,
          options)  # fmt: skip


def name_wide(
    table: Mapping[str, Tensor], layer: int, rows: Tensor, shape: WideShape, half: int, code: int, spans: Tensor,
    *, start: Start = run_kernel,
) -> None:  # fmt: skip
    """What ``name_wide_plain`` does, in one launch; see there."""
    names = "tier", "staged", "staged_for", "staging", "pool", "slot_bytes", "source", "counters"
    start(
        name_wide_kernel,
        (1,),
        (rows, *(table[name] for name in names), spans, layer, shape.half, half, code),
        {
            "EXPERTS": shape.experts, "WIDTH": experts_width(shape.experts),
            "COUNTERS": table["counters"].shape[1],
        },
        {"num_warps": WARPS},
    )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=["ids", "weights", "rows", "scratch"],
    do_not_specialize=["chunk", "chunks", "positions", "counted"],
)
def count_kernel(
    ids, weights, rows, scratch, chunk: tl.int32, chunks: tl.int32, positions: tl.int32, counted: tl.int32,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each chunk of pairs every expert's positions and weights, and a pair's number among its expert's.

    Grid [chunks, parts]: of all pairs, those of prompts, and those of heavy hitters.

    Args:
        ids: [parts, pairs].
        scratch: as in ``WideShape.scratch``: 3 * WIDTH that the deciding program uses, sizes int32 [chunks, WIDTH],
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
    count = tl.minimum(tl.load(rows) * TOP_K - at, chunk)
    of_part = ids + part * positions + at
    sizes, sums = count_pairs(of_part, weights + at, ranks + at, count, expert, EXPERTS, WIDTH, CHUNK)
    tl.store(sizes_at + number * WIDTH + expert, sizes)
    tl.store(sums_at + number * WIDTH + expert, sums)


@triton.jit
def _room(experts, positions, DECODED: tl.constexpr, LAST: tl.constexpr, MIDDLE: tl.constexpr, number):
    """Items of a class that so many experts may have, see ``WideShape.work_items``."""
    room = tl.where(number == 0, experts * ((DECODED + 1) // 2), experts)
    room = tl.where(number == len(MIDDLE) + 1, experts + positions // LAST, room)
    return tl.minimum(room, positions)


@triton.jit
def _all_room(experts, positions, DECODED: tl.constexpr, LAST: tl.constexpr, MIDDLE: tl.constexpr):
    room = 0
    for number in tl.static_range(len(MIDDLE) + 2):
        room += _room(experts, positions, DECODED, LAST, MIDDLE, number)
    return room


@triton.jit(
    do_not_specialize_on_alignment=[*_OF_TABLE, *_OF_DECISION, "group", "spans", "listed"],
    do_not_specialize=["layer", "room", "passes", "half", "most", "positions", "apart", "addresses_apart"],
)
def list_kernel(
    staged, staged_for, staging, offsets, pool, slot_bytes, source,
    count, experts, tiers, slots, fate, addresses, work, scratch, group, spans, listed,
    layer: tl.int32, room: tl.int32, passes: tl.int32, half: tl.int32, most: tl.int32, positions: tl.int32,
    apart: tl.int32, addresses_apart: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, NESTED: tl.constexpr, CLASSES: tl.constexpr, DECODED: tl.constexpr,
    LAST: tl.constexpr, MIDDLE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Groups, copies and work; grid [groups, classes], a list for each program, and what is common for the first.

    Args:
        room: staging slots of a group.
        most: items.
        apart: items from one slice to the next.
        addresses_apart: numbers from one slice's addresses to the next one's.
        CLASSES: of sizes: up to DECODED positions, up to each of MIDDLE, and any number, LAST of an item.
        GROUPS: whether there is more than one group.
    """
    own_group = tl.program_id(0)
    own_class = tl.program_id(1)
    item = tl.arange(0, WIDTH)
    used = item < tl.load(count)
    expert = tl.load(experts + item, mask=used, other=0)
    code = tl.load(tiers + item, mask=used, other=1)
    first = tl.load(work + 3 * item + 1, mask=used, other=0)
    size = tl.load(work + 3 * item + 2, mask=used, other=0) - first
    low_fate = tl.load(fate + item, mask=used, other=0)
    if NESTED:
        high_fate = tl.load(fate + apart + item, mask=used & (code == 2), other=0)
        whole_ahead = item < 0  # none
        ahead_slot = item
    else:
        high_fate = low_fate
        at = staged + layer % 2 * 3 * EXPERTS + expert
        ahead_slot = tl.load(at, mask=used, other=0)
        whole_ahead = (tl.load(at + EXPERTS, mask=used, other=0) == code) & (low_fate != 0)
        whole_ahead = whole_ahead & (tl.load(at + 2 * EXPERTS, mask=used, other=0) == 3)
        whole_ahead = used & (whole_ahead & (tl.load(staged_for + layer % 2) == layer))
    passing = used & (((low_fate == 2) | (high_fate == 2)) & (whole_ahead == 0))
    rank = tl.cumsum(passing.to(tl.int32), 0) - 1
    passing = passing & (rank < passes * room)
    keeps = used & (((low_fate == 1) | (high_fate == 1)) & (passing == 0))
    kept_rank = tl.cumsum(keeps.to(tl.int32), 0) - 1
    each = tl.maximum(room, 1)
    which = tl.where(passing, 2 + rank // each, 0)
    if GROUPS:
        which = tl.where(keeps, 1, which)

    number = tl.where(size > DECODED, 1, 0)
    step = tl.where(own_class == 0, 2, LAST)
    for middle in tl.static_range(CLASSES - 2):
        number += tl.where(size > MIDDLE[middle], 1, 0)
        step = tl.where(own_class == middle + 1, MIDDLE[middle], step)
    decoded = used & (number == 0)
    length = tl.where(used, size, 0)
    few = tl.where(decoded, length, 0)
    many = length - few
    begin = tl.where(decoded, tl.cumsum(few, 0) - few, tl.sum(few, 0) + tl.cumsum(many, 0) - many)

    those = used & ((which == own_group) & (number == own_class))
    pieces = tl.where(those, (length + step - 1) // step, 0)
    at = tl.cumsum(pieces, 0) - pieces
    total = tl.sum(pieces, 0)
    region = 0
    if GROUPS:
        of_two = _all_room(most, positions, DECODED, LAST, MIDDLE)
        of_each = _all_room(tl.minimum(room, most), positions, DECODED, LAST, MIDDLE)
        region = tl.minimum(own_group, 2) * of_two + tl.maximum(own_group - 2, 0) * of_each
    held = tl.where(own_group < 2, most, tl.minimum(room, most))
    for before in tl.static_range(CLASSES):
        region += tl.where(before < own_class, _room(held, positions, DECODED, LAST, MIDDLE, before), 0)
    own_room = _room(held, positions, DECODED, LAST, MIDDLE, own_class)
    out = listed + 3 * region
    for piece in range(tl.max(pieces, 0)):
        inside = those & (piece < pieces)
        to = out + 3 * (at + piece)
        tl.store(to, item, mask=inside)
        tl.store(to + 1, begin + piece * step, mask=inside)
        tl.store(to + 2, tl.minimum(begin + (piece + 1) * step, begin + length), mask=inside)
    for from_item in range(total // WIDTH * WIDTH, own_room, WIDTH):
        empty = from_item + item
        inside = (empty >= total) & (empty < own_room)
        tl.store(out + 3 * empty, most, mask=inside)
        tl.store(out + 3 * empty + 1, 0, mask=inside)
        tl.store(out + 3 * empty + 2, 0, mask=inside)

    if (own_group == 0) & (own_class == 0):
        tl.store(group + item, tl.where(used, which, -1), mask=item < most)
        tl.store(scratch + item, -1)
        tl.debug_barrier()
        tl.store(scratch + expert, begin, mask=used)
        SLICES: tl.constexpr = 2 if NESTED else 1
        lists = SLICES * (most + passes * room)
        for from_span in range(0, lists, WIDTH):
            for column in tl.static_range(3):
                tl.store(spans + 3 * (from_span + item) + column, 0, mask=from_span + item < lists)
        tl.debug_barrier()
        of_group = (half + rank // each) % 2
        span = tl.where(passing, most + rank, kept_rank)
        row = (layer * EXPERTS + expert).to(tl.int64) * 3
        if NESTED:
            low_span = spans + 6 * span
            one = tl.full([WIDTH], 1, tl.int32)
            _list_copy(
                low_span, addresses, slots, low_fate, one, passing, keeps, used, of_group * room + rank % each,
                whole_ahead, ahead_slot, item, row, staging, offsets, pool, slot_bytes, source,
            )  # fmt: skip
            _list_copy(
                low_span + 3, addresses + addresses_apart, slots + apart, high_fate, 2 * one, passing, keeps,
                used & (code == 2), of_group * room + rank % each, whole_ahead, ahead_slot, item, row, staging,
                offsets, pool, slot_bytes, source,
            )  # fmt: skip
        else:
            _list_copy(
                spans + 3 * span, addresses, slots, low_fate, code, passing, keeps, used,
                of_group * room + rank % each, whole_ahead, ahead_slot, item, row, staging, offsets, pool,
                slot_bytes, source,
            )  # fmt: skip


@triton.jit
def _list_copy(
    span, addresses, slots, fate, code, passing, keeps, used, place, whole_ahead, ahead_slot, item, row, staging,
    offsets, pool, slot_bytes, source,
):  # fmt: skip
    """One slice of each item: from where to where it is copied, if it is, and then read."""
    nbytes = tl.load(slot_bytes + code)
    base = tl.load(pool + code)
    passes = passing & (fate == 2)
    copied = used & (passes | ((fate == 1) & (passing | keeps)))
    own = tl.load(slots + item, mask=used, other=0)
    slot = tl.where(passes, tl.load(staging + 2 * code) + place, own)
    begin = tl.load(source + row + code, mask=used, other=0)
    begin = tl.where(whole_ahead, base + ahead_slot * nbytes, begin)
    to = base + slot * nbytes
    tl.store(span, begin, mask=copied)
    tl.store(span + 1, to, mask=copied)
    tl.store(span + 2, nbytes, mask=copied)
    for column in tl.static_range(3):
        tl.store(addresses + 3 * item + column, to + tl.load(offsets + 3 * code + column), mask=copied)


@triton.jit(
    do_not_specialize_on_alignment=["ids", "rows", "scratch", "item_rows", "item_pairs", "computed", "staged_for"],
    do_not_specialize=["chunk", "chunks", "positions", "layer"],
)
def place_pairs_kernel(
    ids, rows, scratch, item_rows, item_pairs, computed, staged_for,
    chunk: tl.int32, chunks: tl.int32, positions: tl.int32, layer: tl.int32,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The position of every pair, and the experts of those that have one; grid [chunks].

    Args:
        computed: int32 [pairs], experts, -1 for a pair that is not computed.
    """
    number = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    before = scratch + 3 * WIDTH + number * WIDTH
    ranks = scratch + (3 + 3 * chunks) * WIDTH
    real = tl.load(rows) * TOP_K
    for first in range(number * chunk, tl.minimum((number + 1) * chunk, positions), WIDTH):
        pair = first + lane
        own = pair < tl.minimum((number + 1) * chunk, positions)
        one_id, inside = ids_of(ids, pair, tl.where(own, real, 0), EXPERTS)
        begin = tl.load(scratch + one_id, mask=inside, other=-1)
        inside = inside & (begin >= 0)
        position = begin + tl.load(before + one_id, mask=inside, other=0) + tl.load(ranks + pair, mask=inside, other=0)
        tl.store(item_pairs + position, pair, mask=inside)
        tl.store(item_rows + position, pair // TOP_K, mask=inside)
        tl.store(computed + pair, tl.where(inside, one_id, -1), mask=own)
    if number == 0:
        tl.store(staged_for + layer % 2, -1)


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows", "tier", "staged", "staged_for", "staging", "pool", "slot_bytes", "source", "counters", "spans",
    ],
    do_not_specialize=["layer", "room", "half", "code"],
)  # fmt: skip
def name_wide_kernel(
    rows, tier, staged, staged_for, staging, pool, slot_bytes, source, counters, spans,
    layer: tl.int32, room: tl.int32, half: tl.int32, code: tl.int32,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """See ``name_wide_plain``; grid [1]."""
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    absent = tl.load(tier + layer * EXPERTS + expert, mask=known, other=1).to(tl.int32) == 0
    rank = tl.cumsum(absent.to(tl.int32), 0) - 1
    chosen = absent & (rank < tl.where(tl.load(rows) > 0, room, 0))
    nbytes = tl.load(slot_bytes + code)
    slot = tl.load(staging + 2 * code) + half * room + rank
    at = staged + layer % 2 * 3 * EXPERTS + expert
    tl.store(at, tl.where(chosen, slot, 0), mask=known)
    tl.store(at + EXPERTS, tl.where(chosen, code, 0), mask=known)
    tl.store(at + 2 * EXPERTS, tl.where(chosen, 3, 0), mask=known)
    tl.store(staged_for + layer % 2, layer)
    begin = tl.load(source + (layer * EXPERTS + expert).to(tl.int64) * 3 + code, mask=chosen, other=0)
    tl.store(spans + 3 * rank, begin, mask=chosen)
    tl.store(spans + 3 * rank + 1, tl.load(pool + code) + slot * nbytes, mask=chosen)
    tl.store(spans + 3 * rank + 2, nbytes, mask=chosen)
    count = number_of(chosen)
    for first in range(0, room, WIDTH):
        empty = (first + expert >= count) & (first + expert < room)
        for column in tl.static_range(3):
            tl.store(spans + 3 * (first + expert) + column, 0, mask=empty)
    add_to(counters + layer * COUNTERS, 11, count)
    add_to(counters + layer * COUNTERS, 12, count * nbytes)
