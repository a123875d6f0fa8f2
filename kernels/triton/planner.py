"""The planner of a layer's step on the device, in one program.

Plain twin, bit for bit: ``vllm_dymoe.planner.small_batch.plan_small_batch``. Names are those of ``Table`` and
``LayerPlan`` there. Only integers are compared, so no order of additions matters.

If precision is chosen among the experts of all ranks, another program does that first (``choose_kernel``).

One program is enough. Everything about experts is a vector of WIDTH elements, and pairs are processed in
chunks. Work that takes a turn for each expert (its slot, its victim) is done for misses only, each of which occupies
the link a hundred times as long.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.planner.constants import (
    AGING,
    GLOBAL_IDS,
    MOST_WEIGHT,
    POSITIONS_AT_ONCE,
    USE,
    WEIGHT_UNIT,
    check_experts,
    experts_width,
)
from vllm_dymoe.planner.threshold import GAIN, MOST

WARPS = 4  # of a program of up to 512 experts, four for each thread
# Elements for each thread of a chunk of pairs times experts; twice as many registers if they are int64.
_ELEMENTS_AT_ONCE = 16

_AGING = tl.constexpr(AGING)
_AT_ONCE = tl.constexpr(POSITIONS_AT_ONCE)
_NONE = tl.constexpr((1 << 63) - 1)
_STEP_BITS = tl.constexpr(40)
_GAIN = tl.constexpr(GAIN)
_MOST = tl.constexpr(MOST)
_MOST_WEIGHT = tl.constexpr(float(MOST_WEIGHT))
_UNIT = tl.constexpr(float(WEIGHT_UNIT))
_USE = tl.constexpr(USE)

_OF_TABLE = (
    "precision",
    "slot",
    "score",
    "used_at",
    "step",
    "quotas",
    "first_slot",
    "staging",
    "staged",
    "staged_for",
    "prefetch_slots",
    "planned",
    "critical",
    "threshold",
    "prompt_threshold",
    "chosen",
    "cpu_costs",
    "bits",
    "offsets",
    "pool",
    "slot_bytes",
    "source",
    "reuse_high",
    "evicts",
    "admits",
    "renormalizes",
    "counters",
    "outside",
    "recording",
    "ring_ids",
    "ring_weights",
    "ring_rows",
)
_OF_PLAN = (
    "count", "experts", "precisions", "slots", "action", "bits", "addresses", "destinations", "work", "rows", "pairs",
    "computed", "weights", "scratch",
)  # fmt: skip


def program_of(width: int) -> tuple[int, int]:
    """Return the warps of a program, and the pairs that it compares at a time.

    Its vectors have ``width`` experts. With four warps, vectors of 1024 experts would not fit into registers.
    """
    warps = WARPS * max(1, width // 512)
    return warps, min(width, _ELEMENTS_AT_ONCE * 32 * warps // width)


def plan_small_batch_on_gpu(
    table: Mapping[str, Tensor],
    layer: int,
    ids: Tensor,
    weights: Tensor,
    rows: Tensor,
    plan: Mapping[str, Tensor],
    *,
    chunks: int = 0,
    marked: bool = False,
    on_cpu: bool = False,
    weights_on_input: bool = False,
    global_ids: Tensor | None = None,
    followed: bool = False,
    start: Start = run_kernel,
) -> None:
    """Run ``plan_small_batch`` on the device, in one launch.

    There are two if precision is chosen among the experts of all ranks.

    Args:
        table: the tensors of a Table, by name.
        layer: index of the layer.
        ids: int32 or int64 [tokens, top_k].
        weights: float32 [tokens, top_k].
        rows: int32 [1], how many tokens are real.
        plan: the tensors of a LayerPlan for these tokens, by name.
        chunks: of a large-batch step, whose pairs ``large_batch`` has counted and will place.
        marked: pairs of prompts and of heavy hitters have been counted, too.
        on_cpu: whether the CPU may execute some experts; otherwise the table's costs are not read.
        weights_on_input: see ``plan_small_batch``; in a large batch pairs are placed later.
        global_ids: see ``plan_small_batch``; a large batch has chosen before (:func:`choose_on_gpu`).
        followed: whether the next launch overlaps this one, see ``start.Overlap``.
        start: makes the launch.

    Raises:
        TypeError: a wrong dtype.
        ValueError: more experts than the program holds, or sizes that disagree.
    """
    (layers, experts), (depth, _, ring_tokens, top_k) = table["precision"].shape, table["ring_ids"].shape
    tokens = ids.shape[0]
    check_experts(experts)
    check_tensor("ids", ids, shape=(tokens, top_k))
    check_tensor("weights", weights, shape=(tokens, top_k), dtype=torch.float32)
    check_tensor("rows", rows, shape=(1,), dtype=torch.int32)
    check_tensor("computed", plan["computed"], shape=(tokens, top_k))
    if tokens > ring_tokens and not chunks:
        raise ValueError(f"a step has {tokens} tokens, but the table was made for at most {ring_tokens}")
    if not chunks:
        check_global_ids(table, global_ids)
        if global_ids is not None:
            choose_on_gpu(table, layer, global_ids, ids, weights, rows, start=start)
    width = experts_width(experts)
    warps, chunk = program_of(width)
    start(
        decide_kernel,
        (1,),
        (
            ids,
            weights,
            rows,
            *(table[name] for name in _OF_TABLE),
            *(plan[name] for name in _OF_PLAN),
            layer,
            layers,
            tokens,
            depth,
            ring_tokens,
            plan["slots"].stride(0),
            chunks,
        ),
        {
            "EXPERTS": experts,
            "TOP_K": top_k,
            "COUNTERS": table["counters"].shape[1],
            "NESTED": len(table["slot"]) > 1,
            "LARGE": chunks > 0,
            "MARKED": marked,
            "CHOSEN": len(table["chosen"]) > 0,
            "CPU": on_cpu,
            "ON_INPUT": weights_on_input,
            "FOLLOWED": followed,
            "WIDTH": width,
            "CHUNK": chunk,
        },
        {"num_warps": warps},
    )


def check_global_ids(table: Mapping[str, Tensor], global_ids: Tensor | None) -> None:
    """Raise ValueError if ids of all ranks are missing, or given but not read."""
    if (global_ids is None) != (len(table["chosen"]) == 0):
        raise ValueError(GLOBAL_IDS)


def choose_on_gpu(
    table: Mapping[str, Tensor], layer: int, global_ids: Tensor, ids: Tensor, weights: Tensor, rows: Tensor,
    scratch: Tensor | None = None, *, chunks: int = 0, marked: bool = False, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Choose the precision of a step's experts among those of all ranks.

    One launch, which writes ``Table.chosen`` and moves the thresholds.

    Args:
        table: the tensors of a Table, by name.
        global_ids: int32 or int64 [tokens, top_k], see ``plan_small_batch``.
        scratch: of a large batch, whose pairs have been counted there by their global ids; None to count them here.
        chunks: as for :func:`plan_small_batch_on_gpu`, as are the others.
        marked: pairs of prompts and of heavy hitters have been counted, too.

    Raises:
        TypeError: a wrong dtype.
        ValueError: more experts than the program holds, or sizes that disagree.
    """
    experts, (tokens, top_k) = table["critical"].shape[1] - 1, ids.shape
    check_experts(experts)
    check_tensor("global_ids", global_ids, shape=(tokens, top_k))
    check_tensor("ids", ids, shape=(tokens, top_k))
    check_tensor("weights", weights, shape=(tokens, top_k), dtype=torch.float32)
    check_tensor("rows", rows, shape=(1,), dtype=torch.int32)
    width = experts_width(experts)
    warps, chunk = program_of(width)
    if scratch is None:
        scratch = rows.new_empty(3 * width)
    columns = (table[name] for name in ("critical", "threshold", "prompt_threshold", "chosen"))
    start(
        choose_kernel,
        (1,),
        (global_ids, ids, weights, rows, *columns, scratch, layer, tokens, chunks),
        {
            "OWN": len(table["chosen"]),
            "EXPERTS": experts,
            "TOP_K": top_k,
            "LARGE": chunks > 0,
            "MARKED": marked,
            "WIDTH": width,
            "CHUNK": chunk,
        },
        {"num_warps": warps},
    )


@triton.jit(
    do_not_specialize_on_alignment=[
        "global_ids",
        "ids",
        "weights",
        "rows",
        "critical",
        "threshold",
        "prompt_threshold",
        "chosen",
        "scratch",
    ],
    do_not_specialize=["layer", "tokens", "chunks"],
)
def choose_kernel(
    global_ids, ids, weights, rows, critical, threshold, prompt_threshold, chosen, scratch,
    layer: tl.int32, tokens: tl.int32, chunks: tl.int32,
    OWN: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, LARGE: tl.constexpr, MARKED: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose LOW or HIGH for a rank's experts among those of all ranks; grid [1].

    Args:
        scratch: int32 [3 * WIDTH], and then the counts of a large batch, contents do not matter otherwise.
        tokens: padding included.
        chunks: of a large batch.
        OWN: experts of the rank.
        EXPERTS: of all ranks.
        LARGE: pairs are counted already.
        MARKED: see ``decide_kernel``.
        WIDTH: a power of two, at least EXPERTS.
        CHUNK: pairs at a time, a power of two.
    """
    real = tl.minimum(tl.load(rows), tokens)
    if real > 0:
        expert = tl.arange(0, WIDTH)
        counted = scratch + 3 * WIDTH
        if LARGE:
            sizes, sums = _add_chunks(counted, chunks, expert, WIDTH)
        else:
            sizes, sums = count_pairs(global_ids, weights, None, real * TOP_K, expert, EXPERTS, WIDTH, CHUNK)
        wanted, high, active, high_prompts, active_prompts = _choose(
            sizes, sums, counted, chunks, tokens * TOP_K, threshold, prompt_threshold,
            critical + layer * (EXPERTS + 1), scratch, expert, MARKED, WIDTH, CHUNK,
        )  # fmt: skip
        tl.debug_barrier()  # where warps hold the same experts, none may load what another has stored
        _follow(threshold, high, active)
        if MARKED:
            _follow(prompt_threshold, high_prompts, active_prompts)
        tl.store(chosen + expert, 1, mask=expert < OWN)
        tl.store(scratch + expert, wanted)
        tl.debug_barrier()
        for first in range(0, real * TOP_K, WIDTH):
            pair = first + expert
            everywhere, known = ids_of(global_ids, pair, real * TOP_K, EXPERTS)
            here, own = ids_of(ids, pair, real * TOP_K, OWN)
            is_high = tl.load(scratch + everywhere, mask=known, other=0) == 2
            tl.store(chosen + here, 2, mask=own & is_high)


_ANY_ALIGNMENT = ["ids", "weights", "rows", *_OF_TABLE, *(f"item_{name}" for name in _OF_PLAN)]


@triton.jit(
    do_not_specialize_on_alignment=_ANY_ALIGNMENT,
    do_not_specialize=["layer", "layers", "tokens", "depth", "ring_tokens", "apart", "chunks"],
)
def decide_kernel(
    ids,
    weights,
    rows,
    precision,
    slot,
    score,
    used_at,
    step,
    quotas,
    first_slot,
    staging,
    staged,
    staged_for,
    prefetch_slots,
    planned,
    critical,
    threshold,
    prompt_threshold,
    chosen,
    cpu_costs,
    bits,
    offsets,
    pool,
    slot_bytes,
    source,
    reuse_high,
    evicts,
    admits,
    renormalizes,
    counters,
    outside,
    recording,
    ring_ids,
    ring_weights,
    ring_rows,
    item_count,
    item_experts,
    item_precisions,
    item_slots,
    item_action,
    item_bits,
    item_addresses,
    item_destinations,
    item_work,
    item_rows,
    item_pairs,
    item_computed,
    item_weights,
    item_scratch,
    layer: tl.int32,
    layers: tl.int32,
    tokens: tl.int32,
    depth: tl.int32,
    ring_tokens: tl.int32,
    apart: tl.int32,
    chunks: tl.int32,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    COUNTERS: tl.constexpr,
    NESTED: tl.constexpr,
    LARGE: tl.constexpr,
    MARKED: tl.constexpr,
    CHOSEN: tl.constexpr,
    CPU: tl.constexpr,
    ON_INPUT: tl.constexpr,
    FOLLOWED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Plan a layer's step; tensors are columns of Table and LayerPlan; grid [1].

    Args:
        item_scratch: int32 [3 * WIDTH + tokens * TOP_K], contents do not matter.
        layers: of the table.
        tokens: padding included.
        depth: of the ring.
        ring_tokens: rows of its entries.
        apart: items from one slice to the next.
        chunks: of a large-batch step.
        EXPERTS: of a layer.
        TOP_K: of a token.
        COUNTERS: columns.
        NESTED: whether versions are nested.
        LARGE: pairs are counted already, and placed later; nothing is recorded.
        MARKED: prompts and other tokens have their own measures, and an expert needs to meet one of them.
        CHOSEN: precision has been chosen among the experts of all ranks (``choose_kernel``).
        CPU: whether the CPU executes some of the experts.
        ON_INPUT: weights multiply inputs, which have a row for each pair.
        FOLLOWED: the next launch begins while this one still lists the items, and waits for its end.
        WIDTH: a power of two, at least EXPERTS.
        CHUNK: pairs at a time, a power of two.
    """
    tl.store(planned, layer)  # copies of predicted experts for this layer stop
    real = tl.minimum(tl.load(rows), tokens)
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    ranks = item_scratch + 3 * WIDTH
    number = tl.load(step + layer) + tl.where(real > 0, 1, 0).to(tl.int64)
    if LARGE:
        sizes, sums = _add_chunks(ranks, chunks, expert, WIDTH)
    else:
        if (tl.load(recording) != 0) & (real > 0):
            at = (number % depth) * layers + layer
            _record(ids, weights, ring_ids, ring_weights, at * ring_tokens * TOP_K, real * TOP_K, EXPERTS, WIDTH)
            tl.store(ring_rows + at, real)
        sizes, sums = count_pairs(ids, weights, ranks, real * TOP_K, expert, EXPERTS, WIDTH, CHUNK)
    active = sizes > 0
    counted = sums != 0  # those with usable weights
    if CHOSEN:
        wanted = tl.load(chosen + expert, mask=active, other=0).to(tl.int32)
    else:
        wanted, number_high, number_active, high_prompts, active_prompts = _choose(
            sizes, sums, ranks, chunks, tokens * TOP_K, threshold, prompt_threshold, critical + layer * (EXPERTS + 1),
            item_scratch, expert, MARKED, WIDTH, CHUNK,
        )  # fmt: skip
    uses = active & (tl.where(wanted == 2, tl.load(bits + 7), tl.load(bits + 4)) != 0)

    row = layer * EXPERTS + expert
    held = tl.load(precision + row, mask=known, other=0).to(tl.int32)
    own_slot = tl.load(slot + row, mask=known, other=-1)
    warmth = tl.load(score + row, mask=known, other=0)
    keeps = tl.load(admits) != 0
    order = tl.load(evicts)
    first_in = order == 0
    aging = tl.where(order == 1, _AGING, 0)
    arrives = uses & ((held == 0) & first_in)
    scored = (uses & counted) & (first_in == 0)
    warmth = tl.where(first_in, warmth, warmth - (warmth >> aging)) + tl.where(scored, _USE, 0)
    last_use = tl.where(scored | arrives, number, tl.load(used_at + row, mask=known, other=0))
    key = (warmth << _STEP_BITS) + last_use
    reuse = tl.load(reuse_high) != 0
    wants_high = uses & (wanted == 2)
    low_quota, high_quota = quotas + layer * 3 + 1, quotas + layer * 3 + 2
    low_first, high_first = first_slot + layer * 3 + 1, first_slot + layer * 3 + 2
    scratch = item_scratch + 2 * WIDTH

    SLICES: tl.constexpr = 2 if NESTED else 1
    arrived_scratch = item_scratch + WIDTH
    tl.debug_barrier()
    ahead_slot, ahead_code, ahead = _arrived(
        staged, staged_for, layer, 0, arrived_scratch, expert, known, EXPERTS, SLICES
    )
    if NESTED:
        residual_slot, residual_code, residual_ahead = _arrived(
            staged, staged_for, layer, 1, arrived_scratch, expert, known, EXPERTS, SLICES
        )
        low_ahead = tl.where(ahead_code == 1, ahead, 0)
        high_ahead = tl.where(residual_code == 2, residual_ahead, 0)
        residual_row = layers * EXPERTS + row
        own_residual = tl.load(slot + residual_row, mask=known, other=-1)
        residual_warmth = tl.load(score + residual_row, mask=known, other=0)
        aged = tl.where(first_in, residual_warmth, residual_warmth - (residual_warmth >> aging))
        residual_scored = wants_high & scored
        residual_warmth = aged + tl.where(residual_scored, _USE, 0)
        residual_use = tl.load(used_at + residual_row, mask=known, other=0)
        residual_use = tl.where(residual_scored | arrives, number, residual_use)
        hit = uses & (held >= wanted)
        computed_precision = tl.where(hit & reuse, held, wanted)
        low_misses = uses & (held == 0)
        high_misses = wants_high & (held != 2)
        lacks, residual_lacks = low_misses, high_misses
        far = expert < 0  # none
        if CPU:
            far = _executed_on_cpu(
                cpu_costs, keeps, low_misses, high_misses, low_ahead, high_ahead, number_of(held > 0),
                number_of(held == 2), low_quota, high_quota, wanted, sizes, warmth, expert, WIDTH,
            )  # fmt: skip
            low_misses = low_misses & (far == 0)
            high_misses = high_misses & (far == 0)
        low_kept, low_gone, now_slot = _find_places(
            low_quota, low_first, scratch, uses, low_misses & keeps, held > 0, uses, warmth, key, own_slot, expert,
            WIDTH,
        )  # fmt: skip
        whole = (held == 2) & (low_gone == 0)
        residual_key = (residual_warmth << _STEP_BITS) + residual_use
        high_kept, high_gone, now_residual = _find_places(
            high_quota, high_first, scratch, wants_high, high_misses & (keeps & ((held > 0) | low_kept)), whole, uses,
            residual_warmth, residual_key, tl.where(whole, own_residual, -1), expert, WIDTH,
        )  # fmt: skip
        now = tl.where(((held > 0) & (low_gone == 0)) | low_kept, 1, 0)
        now = tl.where((whole & (high_gone == 0)) | high_kept, 2, now)
    else:
        residual_slot = ahead_slot
        low_ahead = tl.where(ahead_code == wanted, ahead, 0)
        high_ahead = low_ahead
        hit = uses & tl.where(reuse, held >= wanted, held == wanted)
        computed_precision = tl.where(hit, held, wanted)
        high_misses = wants_high & (hit == 0)
        low_misses = uses & (wanted == 1) & (hit == 0)
        lacks = uses & (hit == 0) & (ahead_code == wanted)
        far = expert < 0  # none
        if CPU:
            far = _executed_on_cpu(
                cpu_costs, keeps, low_misses, high_misses, low_ahead, high_ahead, number_of(held == 1),
                number_of(held == 2), low_quota, high_quota, wanted, sizes, warmth, expert, WIDTH,
            )  # fmt: skip
            low_misses = low_misses & (far == 0)
            high_misses = high_misses & (far == 0)
        high_kept, high_gone, now_slot = _find_places(
            high_quota, high_first, scratch, wants_high, high_misses & keeps, held == 2, uses, warmth, key, own_slot,
            expert, WIDTH,
        )  # fmt: skip
        low = (held == 1) & (high_kept == 0)  # the other low versions are superseded by high ones
        low_kept, low_gone, now_slot = _find_places(
            low_quota, low_first, scratch, uses & (wanted == 1), low_misses & keeps, low, uses, warmth, key, now_slot,
            expert, WIDTH,
        )  # fmt: skip
        now = tl.where(high_kept, 2, tl.where(low_kept, 1, tl.where(high_gone | low_gone, 0, held)))

    tl.debug_barrier()  # where warps hold the same experts, none may load what another has stored
    if real > 0:
        tl.store(step + layer, number)
        if not CHOSEN:
            _follow(threshold, number_high, number_active)
            if MARKED:
                _follow(prompt_threshold, high_prompts, active_prompts)
        tl.store(score + row, warmth, mask=known)
        tl.store(used_at + row, last_use, mask=known)
        tl.store(precision + row, now.to(tl.int8), mask=known)
        tl.store(slot + row, now_slot, mask=known)
        if NESTED:
            tl.store(slot + residual_row, now_residual, mask=known)
            tl.store(score + residual_row, residual_warmth, mask=known)
            tl.store(used_at + residual_row, residual_use, mask=known)
        counts = counters + layer * COUNTERS
        add_to(counts, 0, 1)
        add_to(counts, 1, number_of(active & (wanted == 2)))
        add_to(counts, 2, number_of(active & (wanted == 1)))
        add_to(counts, 3, number_of(active & (uses == 0)))
        add_to(counts, 4, number_of(hit))
        add_to(counts, 5, number_of(hit & (computed_precision != wanted)))
        add_to(counts, 6, number_of(high_misses))
        add_to(counts, 7, number_of(low_misses))
        add_to(counts, 8, number_of(high_misses & (high_kept == 0)) + number_of(low_misses & (low_kept == 0)))
        add_to(counts, 9, number_of((wants_high & (hit == 0)) & ((held == 1) & (far == 0))))
        add_to(counts, 10, number_of(high_gone) + number_of(low_gone))
        add_to(counts, 15, number_of(far))

    # The items. The next launch's programs take their places meanwhile. Earlier they would only wait longer, in places
    # that predictions of the next layer can use, which run concurrently.
    if FOLLOWED:
        gdc_launch_dependents()
    positions = tl.where(uses, sizes, 0)
    begins = tl.cumsum(positions, 0) - positions
    item = tl.cumsum(uses.to(tl.int32), 0) - 1
    items = number_of(uses)
    most = tl.minimum(EXPERTS, tokens * TOP_K)
    low_action = tl.where(far, 3, tl.where(low_misses, tl.where(low_kept, 1, 2), 0))
    high_action = tl.where(far, 3, tl.where(high_misses, tl.where(high_kept, 1, 2), 0))
    ahead_counts = counters + layer * COUNTERS
    if LARGE == 0:
        if real > 0:
            _count_ahead(ahead_counts + 11, offsets, slot_bytes, ahead_code, ahead)
            _count_absent(ahead_counts + 16, ahead_code, ahead, lacks)
            if NESTED:
                _count_ahead(ahead_counts + 11, offsets, slot_bytes, residual_code, residual_ahead)
                _count_absent(ahead_counts + 16, residual_code, residual_ahead, residual_lacks)
    if NESTED:
        ahead = tl.where(low_misses, low_ahead, 0)
        residual_ahead = tl.where(high_misses, high_ahead, 0)
        if real > 0:
            _count_ahead(ahead_counts + 13, offsets, slot_bytes, residual_code, residual_ahead)
    else:
        ahead = tl.where(uses & (hit == 0) & (far == 0), low_ahead, 0)
        residual_ahead = ahead
    if real > 0:
        _count_ahead(ahead_counts + 13, offsets, slot_bytes, ahead_code, ahead)
    read_through = uses & (sizes > _AT_ONCE)
    low_through, high_through = read_through & (ahead < 3), read_through & (residual_ahead < 3)
    low_staged = _staging_slots(staging + 2, prefetch_slots + 1, low_through & (low_action == 2))
    high_staged = _staging_slots(staging + 4, prefetch_slots + 2, high_through & (high_action == 2))
    high = computed_precision == 2
    empty = (expert >= items) & (expert < most)
    if NESTED:
        action = low_action
        to = tl.where(action == 3, -1, tl.where(action == 2, low_staged, now_slot))
        _list_slices(
            item_slots, item_action, item_addresses, item_destinations, item, to, ahead_slot, ahead, action, uses, uses,
            pool + 1, slot_bytes + 1, source + row.to(tl.int64) * 3 + 1, offsets + 3, empty, expert,
        )  # fmt: skip
        to = tl.where(far, -1, tl.where(high_action == 2, high_staged, now_residual))
        _list_slices(
            item_slots + apart, item_action + apart, item_addresses + 3 * apart, item_destinations + 3 * apart,
            item, to, residual_slot, residual_ahead, high_action, uses, high, pool + 2, slot_bytes + 2,
            source + row.to(tl.int64) * 3 + 2, offsets + 6, empty, expert,
        )  # fmt: skip
    else:
        action = tl.where(high, high_action, low_action)
        to = tl.where(far, -1, tl.where(action == 2, tl.where(high, high_staged, low_staged), now_slot))
        _list_slices(
            item_slots, item_action, item_addresses, item_destinations, item, to, ahead_slot, ahead, action, uses,
            uses, pool + computed_precision, slot_bytes + computed_precision,
            source + row.to(tl.int64) * 3 + computed_precision, offsets + 3 * computed_precision, empty, expert,
        )  # fmt: skip
    tl.store(item_count, items)
    tl.store(item_experts + item, expert, mask=uses)
    tl.store(item_precisions + item, computed_precision, mask=uses)
    tl.store(item_work + 3 * item, item, mask=uses)
    tl.store(item_work + 3 * item + 1, begins, mask=uses)
    tl.store(item_work + 3 * item + 2, begins + tl.where(far, 0, positions), mask=uses)
    tl.store(item_experts + expert, -1, mask=empty)
    tl.store(item_precisions + expert, 0, mask=empty)
    for column in tl.static_range(3):
        width = tl.where(high, tl.load(bits + 6 + column), tl.load(bits + 3 + column))
        tl.store(item_bits + 3 * item + column, width, mask=uses)
        tl.store(item_bits + 3 * expert + column, 0, mask=empty)
        tl.store(item_work + 3 * expert + column, 0, mask=empty)
    tl.store(item_work + 3 * most, -1)
    tl.store(item_work + 3 * most + 1, 0)
    tl.store(item_work + 3 * most + 2, tokens)

    if not LARGE:  # the positions
        tl.store(item_scratch + expert, tl.where(uses, begins, -1))
        if CPU:
            tl.store(item_scratch + WIDTH + expert, tl.where(far, 2, 1))
        tl.debug_barrier()
        tl.store(staged_for + layer % 2, -1)
        total = tl.sum(positions, 0)
        wrong = tl.full([WIDTH], -1, tl.int64)
        for first_pair in range(0, tokens * TOP_K, WIDTH):
            pair = first_pair + expert
            one_id, inside = ids_of(ids, pair, real * TOP_K, EXPERTS)
            begin_at = tl.load(item_scratch + one_id, mask=inside, other=-1)
            inside = inside & (begin_at >= 0)
            position = begin_at + tl.load(ranks + pair, mask=inside, other=0)
            tl.store(item_pairs + position, pair, mask=inside)
            tl.store(item_rows + position, row_of(pair, TOP_K, ON_INPUT), mask=inside)
            beyond = (pair >= total) & (pair < tokens * TOP_K)
            tl.store(item_pairs + pair, 0, mask=beyond)
            tl.store(item_rows + pair, 0, mask=beyond)
            computed = inside.to(tl.int32)
            if CPU:
                computed = tl.load(item_scratch + WIDTH + one_id, mask=inside, other=0)
            tl.store(item_computed + pair, computed, mask=pair < tokens * TOP_K)
            wrong = tl.maximum(wrong, outside_of(ids, pair, real * TOP_K, EXPERTS))
            weight = weights_of(weights, ids, item_scratch, pair, real * TOP_K, renormalizes, EXPERTS, TOP_K, ON_INPUT)
            tl.store(item_weights + pair, weight, mask=pair < tokens * TOP_K)
        tell_outside(outside + layer, wrong)


@triton.jit
def _executed_on_cpu(
    cpu_costs, keeps, low_misses, high_misses, low_ahead, high_ahead, lows, highs, low_quota, high_quota, wanted, sizes,
    warmth, expert, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return which misses the CPU executes, bool [WIDTH].

    Args:
        cpu_costs: of the table.
        low_misses: bool [WIDTH], experts that lack a low version, or base.
        high_misses: bool [WIDTH], experts that lack a high version, or residual slice.
        low_ahead: int32 [WIDTH], projections of the former that were fetched ahead.
        high_ahead: int32 [WIDTH], projections of the latter.
        lows: number of low versions, or bases, that the layer holds.
        highs: number of high versions, or residual slices, that it holds.
        low_quota: pointer to the quota of the former.
        high_quota: pointer to the quota of the latter.
        wanted: int32 [WIDTH], wanted versions.
        sizes: int32 [WIDTH], rows.
        warmth: int64 [WIDTH], scores.
    """
    link = tl.where(low_misses, tl.load(cpu_costs + 4) * (3 - low_ahead) // 3, 0)
    link += tl.where(high_misses, tl.load(cpu_costs + 8) * (3 - high_ahead) // 3, 0)
    first = tl.load(cpu_costs + 4 * wanted + 1)
    host = first + (sizes - 1) * tl.load(cpu_costs + 4 * wanted + 2)
    may = (first > 0) & (sizes <= tl.load(cpu_costs + 4 * wanted + 3)) & (link > 0)
    low_free = tl.where(keeps, tl.load(low_quota) - lows, 0)
    high_free = tl.where(keeps, tl.load(high_quota) - highs, 0)
    may = may & ((low_misses == 0) | (tl.cumsum(low_misses.to(tl.int32), 0) > low_free))
    may = may & ((high_misses == 0) | (tl.cumsum(high_misses.to(tl.int32), 0) > high_free))
    longer = tl.sum(link, 0)
    busy = tl.load(cpu_costs)
    far = expert < 0  # none
    turns = number_of(may)
    for _ in range(turns):
        coldest = tl.min(tl.where(may, warmth, _NONE), 0)
        one = tl.min(tl.where(may & (warmth == coldest), expert, WIDTH), 0)
        busy += tl.sum(tl.where(expert == one, host, 0), 0)
        far = far | ((expert == one) & (busy < longer))
        longer -= tl.sum(tl.where(expert == one, link, 0), 0)
        may = may & (expert != one)
    return far


@triton.jit
def _find_places(
    quota_at, first_at, scratch, wanting, missing, here, uses, warmth, key, slot, expert, WIDTH: tl.constexpr
):
    """Find places of one kind for misses.

    Free places are taken first, and then those of colder experts that are not used.

    Args:
        quota_at: pointer to the layer's quota.
        first_at: pointer to its first slot.
        scratch: int32 [WIDTH].
        wanting: bool [WIDTH], experts that use this kind; if they exceed the quota, the hottest come first.
        missing: bool [WIDTH], experts that need a place.
        here: bool [WIDTH], experts that have one.
        uses: bool [WIDTH], experts that may not lose it.
        warmth: int64 [WIDTH], scores.
        key: int64 [WIDTH], orders victims.
        slot: int32 [WIDTH], slots of all experts; in this pool where `here` is set.

    Returns:
        Which experts are admitted, which are evicted, and the slots afterwards.
    """
    kept = missing & (expert < 0)  # none
    gone_for_good = kept
    misses = number_of(missing)
    if misses > 0:
        quota, first = tl.load(quota_at), tl.load(first_at)
        free = quota - number_of(here)
        wide = number_of(wanting) > quota
        order = tl.where(wide, warmth, 0)
        vacant = _vacant(here, slot - first, quota, scratch, expert)
        victims = tl.where(here & (uses == 0), key, _NONE)
        # If misses come by falling score, the first one that gets no slot is the last that could have got one.
        turns = tl.where(wide, tl.minimum(misses, tl.maximum(free, 0) + number_of(here & (uses == 0))), misses)
        for turn_number in range(turns):
            hottest = tl.max(tl.where(missing, order, -1), 0)
            first_of = missing & ((order == hottest) | (turn_number < free))
            one = tl.min(tl.where(first_of, expert, WIDTH), 0)
            missing = missing & (expert != one)
            coldest = tl.min(victims, 0)
            victim = tl.min(tl.where(victims == coldest, expert, WIDTH), 0)
            own_warmth = tl.sum(tl.where(expert == one, warmth, 0), 0)
            takes_free = turn_number < free
            takes_place = (turn_number >= free) & (coldest != _NONE)
            takes_place = takes_place & (own_warmth >= (coldest >> _STEP_BITS))
            free_slot = tl.min(tl.where(vacant, expert, WIDTH), 0)
            taken = tl.sum(tl.where(expert == victim, slot, 0), 0)
            taken = tl.where(takes_free, free_slot + first, taken)
            vacant = vacant & ((expert != free_slot) | (takes_free == 0))
            gone = (expert == victim) & takes_place
            victims = tl.where(gone, _NONE, victims)
            comes = (expert == one) & (takes_free | takes_place)
            slot = tl.where(gone, -1, tl.where(comes, taken, slot))
            kept = kept | comes
            gone_for_good = gone_for_good | gone
    return kept, gone_for_good, slot


@triton.jit
def _staging_slots(staging, prefetched, passes):
    """Return a staging slot for each passing expert, as long as there are some.

    The result is int32 [WIDTH], -1 for others. The first slots are those of predicted experts.
    """
    place = tl.load(prefetched) + tl.cumsum(passes.to(tl.int32), 0) - 1
    has = passes & (place < tl.load(staging + 1))
    return tl.where(has, tl.load(staging) + place, -1)


@triton.jit
def _list_slices(
    item_slots, item_action, item_addresses, item_destinations, item, to, ahead_slot, ahead, action, uses,
    computed, pool, slot_bytes, source, offsets, empty, expert,
):  # fmt: skip
    """Write where items read one slice, or a separate version, and where it is copied.

    Items not computed get no address.

    The first projections of a miss are read where they were fetched ahead: `ahead` of them, in `ahead_slot`.
    """
    tl.store(item_slots + item, tl.where(computed, to, -1), mask=uses)
    tl.store(item_action + item, tl.where(computed, action, 0), mask=uses)
    slot_at = tl.load(pool) + to * tl.load(slot_bytes)
    ahead_at = tl.load(pool) + ahead_slot * tl.load(slot_bytes)
    begin = tl.where(action == 0, slot_at, tl.load(source, mask=uses, other=0))
    tl.store(item_slots + expert, -1, mask=empty)
    tl.store(item_action + expert, 0, mask=empty)
    for column in tl.static_range(3):
        offset = tl.load(offsets + column)
        stored = computed & (action != 0) & (to >= 0)
        address = tl.where(column < ahead, ahead_at, begin) + offset
        tl.store(item_addresses + 3 * item + column, tl.where(computed, address, 0), mask=uses)
        tl.store(item_destinations + 3 * item + column, tl.where(stored, slot_at + offset, 0), mask=uses)
        tl.store(item_addresses + 3 * expert + column, 0, mask=empty)
        tl.store(item_destinations + 3 * expert + column, 0, mask=empty)


@triton.jit
def _arrived(
    staged, staged_for, layer, slice_number, scratch, expert, known, EXPERTS: tl.constexpr, SLICES: tl.constexpr
):
    """Return what was fetched ahead of a slice of each expert.

    Args:
        scratch: int32 [WIDTH].

    Returns:
        slot, version and number of projections.
    """
    at = staged + (layer % 2 * SLICES + slice_number) * 3 * EXPERTS + expert
    slot = tl.load(at, mask=known, other=-1)
    code = tl.load(at + EXPERTS, mask=known, other=0)
    # Volatile: copies may arrive now. The bytes of those that are seen here are read by later launches.
    ahead = tl.load(at + 2 * EXPERTS, mask=known, other=0, volatile=True)
    mine = tl.load(staged_for + layer % 2) == layer
    code, ahead = tl.where(mine, code, 0), tl.where(mine, ahead, 0)
    # Where warps hold the same experts, all have to see the same arrivals.
    tl.store(scratch + expert, ahead)
    tl.debug_barrier()
    ahead = tl.load(scratch + expert)
    tl.debug_barrier()
    return slot, code, ahead


@triton.jit
def _count_ahead(counts, offsets, slot_bytes, code, ahead):
    """Add experts of which something was fetched ahead, and its bytes."""
    nbytes = tl.sum(tl.where(ahead > 0, bytes_ahead(offsets, slot_bytes, code, ahead), 0), 0)
    add_to(counts, 0, number_of(ahead > 0))
    add_to(counts, 1, nbytes)


@triton.jit
def _count_absent(counts, code, ahead, missed):
    """Count listed experts of which nothing has arrived, missed or not."""
    absent = (code > 0) & (ahead == 0)
    add_to(counts, 0, number_of(absent & missed))
    add_to(counts, 1, number_of(absent & (missed == 0)))


@triton.jit
def number_of(those):
    """Return how many elements are set."""
    return tl.sum(those.to(tl.int32), 0)


@triton.jit
def bytes_ahead(offsets, slot_bytes, precision, projections):
    """Return the bytes of the first projections that were fetched ahead.

    int64; 0 for none.
    """
    part = tl.load(offsets + 3 * precision + tl.where(projections < 3, projections, 0))
    return tl.where(projections == 3, tl.load(slot_bytes + precision), part)


@triton.jit
def add_to(counts, which, value):
    """Add to a counter; one program at a time runs."""
    tl.store(counts + which, tl.load(counts + which) + value)


@triton.jit
def ids_of(ids, pair, count, EXPERTS: tl.constexpr):
    """Return the experts of some pairs, int32, and which of them this rank has.

    Other experts are -1.
    """
    one_id = tl.load(ids + pair, mask=pair < count, other=-1)
    inside = (one_id >= 0) & (one_id < EXPERTS)
    return tl.where(inside, one_id, -1).to(tl.int32), inside


@triton.jit
def outside_of(ids, pair, count, EXPERTS: tl.constexpr):
    """Return ids that are neither an expert's nor -1.

    They are int64 as in ``Table.outside``; -1 for the others.
    """
    one_id = tl.load(ids + pair, mask=pair < count, other=-1).to(tl.int64)
    return tl.where((one_id < -1) | (one_id >= EXPERTS), one_id & _NONE, -1)


@triton.jit
def row_of(pair, TOP_K: tl.constexpr, ON_INPUT: tl.constexpr):
    """Return the rows of the input that some pairs read."""
    return pair if ON_INPUT else pair // TOP_K


@triton.jit
def weights_of(
    weights, ids, begins, pair, count, renormalizes, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    ON_INPUT: tl.constexpr,
):  # fmt: skip
    """Return the weights of the outputs of some pairs, float32.

    If it is asked for, they take over those of a token's skipped experts.

    Args:
        begins: int32, negative for an expert that is not computed.
        pair: the pairs' numbers; weights from `count` on are 0.
        renormalizes: of the table.
    """
    weight = _weight_at(weights, pair, pair < count, ON_INPUT)
    if tl.load(renormalizes) != 0:
        here = tl.where(pair < 0, weight, 0.0)  # zeros
        stays = here
        for k in range(TOP_K):
            other = pair // TOP_K * TOP_K + k
            one_id, inside = ids_of(ids, other, count, EXPERTS)
            one = _weight_at(weights, other, inside, ON_INPUT)
            here += one
            stays += tl.where(tl.load(begins + one_id, mask=inside, other=-1) >= 0, one, 0.0)
        weight = weight * tl.where(stays > 0, tl.div_rn(here, stays), 1.0)
    return weight


@triton.jit
def _weight_at(weights, pair, inside, ON_INPUT: tl.constexpr):
    """Return what outputs are multiplied with, 0 where not inside.

    It is the router's weight, or 1 if that multiplies inputs.
    """
    if ON_INPUT:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.load(weights + pair, mask=inside, other=0.0)


@triton.jit
def tell_outside(outside, wrong):
    """Store the highest id of no expert, if there is one."""
    highest = tl.max(wrong, 0)
    if highest >= 0:
        tl.atomic_max(outside, highest)


@triton.jit
def _record(ids, weights, ring_ids, ring_weights, at, count, EXPERTS: tl.constexpr, WIDTH: tl.constexpr):
    for first in range(0, count, WIDTH):
        pair = first + tl.arange(0, WIDTH)
        inside = pair < count
        one_id, _ = ids_of(ids, pair, count, EXPERTS)
        tl.store(ring_ids + at + pair, one_id, mask=inside)
        tl.store(ring_weights + at + pair, tl.load(weights + pair, mask=inside), mask=inside)


@triton.jit
def count_pairs(ids, weights, ranks, count, expert, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return each expert's positions and sum of weights, int32 and int64 [WIDTH].

    Numbers each expert's pairs in ``ranks``, unless it is None.

    Weights are summed as integers in 1 / _UNIT, with one more unit for each that is usable: 0 for none.
    """
    sizes = tl.zeros([WIDTH], tl.int32)
    sums = tl.zeros([WIDTH], tl.int64)
    lane = tl.arange(0, CHUNK)
    for first in range(0, count, CHUNK):
        one_id, inside = ids_of(ids, first + lane, count, EXPERTS)
        weight = tl.load(weights + first + lane, mask=inside, other=0.0)
        usable = tl.abs(weight) < _MOST_WEIGHT
        units = (tl.where(usable, weight, 0.0) * _UNIT).to(tl.int64) + usable.to(tl.int64)
        chosen = one_id[:, None] == expert[None, :]
        if ranks is not None:
            other_id, _ = ids_of(ids, first + lane, count, EXPERTS)
            before = (one_id[:, None] == other_id[None, :]) & (lane[:, None] > lane[None, :])
            rank = tl.sum(before.to(tl.int32), 1) + tl.sum(tl.where(chosen, sizes[None, :], 0), 1)
            tl.store(ranks + first + lane, rank, mask=inside)
        sizes += tl.sum(chosen.to(tl.int32), 0)
        sums += tl.sum(tl.where(chosen, units[:, None], 0), 0)
    return sizes, sums


@triton.jit
def _add_chunks(counted, chunks, expert, WIDTH: tl.constexpr):
    """Add up sizes and sums of all chunks, see ``count_kernel``.

    Replaces those of each chunk by the totals of the chunks before it.
    """
    sizes = tl.zeros([WIDTH], tl.int32)
    sums = tl.zeros([WIDTH], tl.int64)
    sums_at = (counted + chunks * WIDTH).to(tl.pointer_type(tl.int64))
    for number in range(chunks):
        of_chunk = tl.load(counted + number * WIDTH + expert)
        sums += tl.load(sums_at + number * WIDTH + expert)
        tl.debug_barrier()  # where warps hold the same experts, none may load what another has stored
        tl.store(counted + number * WIDTH + expert, sizes)
        sizes += of_chunk
    return sizes, sums


@triton.jit
def _choose(
    sizes, sums, parts, chunks, positions, threshold, prompt_threshold, critical, scratch, expert,
    MARKED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose LOW or HIGH for each active expert, see ``high_experts``.

    Args:
        sizes: int32 [WIDTH], positions of each expert.
        sums: int64 [WIDTH], of its weights.
        parts: counts of all pairs; with MARKED those of prompts and of heavy hitters follow, see ``count_kernel``.
        positions: pairs of the step, padding included.
        critical: pointer to the layer's numbers of high experts.
        scratch: int32 [3 * WIDTH].

    Returns:
        int32 [WIDTH], 0 for experts that are not active; how many of the experts that count are high, and how many
        count; with MARKED the same two numbers of prompts.
    """
    others = sizes > 0
    wanted_prompts = tl.zeros([WIDTH], tl.int32)
    high_prompts = 0
    active_prompts = 0
    if MARKED:
        part = 3 * chunks * WIDTH + (positions + 1) // 2 * 2
        prompt_sizes, prompt_sums = _add_chunks(parts + part, chunks, expert, WIDTH)
        hits, heavy_sums = _add_chunks(parts + 2 * part, chunks, expert, WIDTH)
        of_prompts = prompt_sizes > 0
        active_prompts = number_of(of_prompts & (prompt_sums != 0))
        wanted_prompts = precisions_of(
            of_prompts, active_prompts, heavy_sums, prompt_threshold, critical, scratch, expert, WIDTH, CHUNK, hits
        )
        high_prompts = number_of((wanted_prompts == 2) & (prompt_sums != 0))
        others = sizes > prompt_sizes
        sums = sums - prompt_sums
        tl.debug_barrier()
    active = number_of(others & (sums != 0))
    wanted = precisions_of(others, active, sums, threshold, critical, scratch, expert, WIDTH, CHUNK)
    high = number_of((wanted == 2) & (sums != 0))
    return tl.where(wanted > wanted_prompts, wanted, wanted_prompts), high, active, high_prompts, active_prompts


@triton.jit
def precisions_of(
    active, number, sums, threshold, critical, scratch, expert, WIDTH: tl.constexpr, CHUNK: tl.constexpr, hits=None
):
    """Return versions: HIGH for the most important active experts, else LOW.

    The result is int32 [WIDTH]. ``number`` experts are active with usable weights. Experts above the threshold are
    high. Without a threshold as many are high as are critical, among equals the first ones. With hits, experts are
    ordered by hits first, then by sums. Uses int32 [3 * WIDTH] of scratch.
    """
    high = tl.load(critical + number)
    wanted = tl.where(active, 2, 0)
    if tl.load(threshold + 1) >= 0:
        parts = tl.where(active, sums >> 20, 0)
        is_above = (parts * number << 16) > (tl.load(threshold) >> 16) * tl.sum(parts, 0)
        most = tl.max(tl.where(active, sums, -1), 0)
        first = tl.min(tl.where(active & (sums == most), expert, WIDTH), 0)
        always = (expert == first) & (tl.load(threshold + 1) != 0)
        wanted = tl.where(active & (is_above | always), 2, tl.where(active, 1, 0))
    elif high < number:
        importance = tl.where(active, sums, -1)
        at = scratch.to(tl.pointer_type(tl.int64))
        if hits is not None:
            tl.store(scratch + 2 * WIDTH + expert, hits)
        tl.store(at + expert, importance)
        tl.debug_barrier()
        rank = tl.zeros([WIDTH], tl.int32)
        for first in range(0, WIDTH, CHUNK):
            other = first + tl.arange(0, CHUNK)
            others = tl.load(at + other)[:, None]
            as_good = (others == importance[None, :]) & (other[:, None] < expert[None, :])
            before = (others > importance[None, :]) | as_good
            if hits is not None:
                other_hits = tl.load(scratch + 2 * WIDTH + other)[:, None]
                before = (other_hits > hits[None, :]) | ((other_hits == hits[None, :]) & before)
            rank += tl.sum(before.to(tl.int32), 0)
        wanted = tl.where(active & (rank >= high), 1, wanted)
    return wanted


@triton.jit
def _follow(threshold, high, active):
    """Move the threshold after a layer, as ``planner.threshold.follow`` does."""
    retention = tl.load(threshold + 1)
    if (retention >= 0) & ((active > 0) & (active * retention >= 65536)):
        error = (high << 16) // tl.maximum(active, 1) - retention
        tl.store(threshold, tl.minimum(tl.maximum(tl.load(threshold) + (error << _GAIN), 0), _MOST))


@triton.jit
def _vacant(named, place, quota, scratch, expert):
    """Return which slots of a layer's range no row names.

    The result is bool [WIDTH], counted from the beginning of the range.
    """
    tl.store(scratch + expert, 0)
    tl.debug_barrier()
    tl.store(scratch + place, 1, mask=named & (place >= 0) & (place < quota))
    tl.debug_barrier()
    taken = tl.load(scratch + expert)
    tl.debug_barrier()  # the other precision clears it
    return (taken == 0) & (expert < quota)
