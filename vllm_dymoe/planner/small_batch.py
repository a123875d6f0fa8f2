"""The planner for a whole layer, with NumPy.

This is the plain twin of ``kernels/triton/planner.py``, bit for bit. In addition to the rule it chooses precisions
(DyMoE 4.2 and 4.3), assigns slots, and writes the plan.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import GLOBAL_IDS, POSITIONS_AT_ONCE, PROJECTIONS, Action
from vllm_dymoe.planner.hotness import usable
from vllm_dymoe.planner.importance import high_experts, importance
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import PromptTokens, own_experts
from vllm_dymoe.planner.rule import ABSENT, CPU, HIGH, HIT, LOW, STREAM, Ints
from vllm_dymoe.planner.table import ID_BITS, Counter, Table
from vllm_dymoe.planner.weights import renormalized


def plan_small_batch(
    table: Table, layer: int, ids: Tensor, weights: Tensor, rows: Tensor, plan: LayerPlan, *, large: bool = False,
    marks: Tensor | None = None, weights_on_input: bool = False, global_ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Plan a layer's step: update the table's rows and write the plan.

    Without real tokens the table's rows do not change.

    Args:
        table: tensors on a CPU, like all other arguments.
        ids: int32 or int64 [tokens, top_k]; -1 where another rank has the expert. Other ids outside of the experts are
            reported in ``Table.outside`` and not computed.
        weights: float32 [tokens, top_k].
        rows: int32 [1], number of real tokens, which come first; at most all are.
        plan: for ``tokens`` rows, overwritten.
        large: a large-batch step, which is not recorded in the ring and executes nothing on the CPU.
        marks: int8 [tokens], 1 for tokens of prompts, 2 for heavy hitters among these, 0 for others; None if all are 0.
        weights_on_input: weights multiply the experts' inputs, which have a row for each pair; outputs weigh 1.
        global_ids: int [tokens, top_k], the same choices as the router numbers them, -1 for none; needed if precision
            is chosen among the experts of all ranks (``Table.all_experts``), and otherwise None.
    """
    if (global_ids is None) != (table.all_experts == 0):
        raise ValueError(GLOBAL_IDS)
    _empty(plan)
    real, top_k, host = min(int(rows), len(ids)), ids.shape[1], table.on_host()
    host.planned[0] = layer
    if not real:
        if not large:
            host.staged_for[layer % 2] = -1
        return
    chosen = ids[:real].numpy().astype(np.int64).reshape(-1)
    outside = (chosen < -1) | (chosen >= host.experts)
    if outside.any():  # such pairs are not computed, and the host fails the step
        host.outside[layer] = max(host.outside[layer], (chosen[outside] & ID_BITS).max())
        chosen = np.where(outside, -1, chosen)
    ids = torch.from_numpy(chosen).view(real, top_k)
    if global_ids is not None:
        global_ids = global_ids[:real].long()
        global_ids = torch.where((global_ids >= 0) & (global_ids < host.all_experts), global_ids, -1)
    if host.recording[0] and not large:
        at = (int(host.step[layer]) + 1) % len(host.ring_ids), layer
        host.ring_ids[at][:real], host.ring_weights[at][:real] = ids, weights[:real]
        host.ring_rows[at] = real
    uses = chosen[usable(weights[:real]).numpy().reshape(-1) & (chosen >= 0)]
    sizes = np.bincount(chosen[chosen >= 0], minlength=host.experts)
    active = sizes.nonzero()[0]
    marks = None if marks is None else marks[:real]
    wanted = _choose(host, layer, active, ids, weights[:real], marks, global_ids)
    skipped = host.bits[layer, wanted, 1] == 0
    counted = {Counter.STEPS: 1, Counter.NEEDED_HIGH: wanted == HIGH, Counter.NEEDED_LOW: wanted == LOW}
    active, wanted = active[~skipped], wanted[~skipped]
    before = host.precision[layer, active]
    sizes_there = None if large else sizes[active]
    ahead = _fetched_ahead(host, layer, active, wanted)
    places = host.begin_step(layer, active, wanted, sizes_there, counted=np.isin(active, uses), ahead=ahead)
    hit, on_cpu = (places == HIT).all(0), (places == CPU).any(0)
    serves = hit if not host.nested else hit & bool(host.reuse_high[0])
    computed = np.where(serves, before, wanted)
    host.keep(layer, active, wanted, places)
    fetched = {code: (part != HIT) & ~on_cpu for code, part in zip((LOW, HIGH), places, strict=False)}
    if not host.nested:
        fetched = {code: ~hit & ~on_cpu & (wanted == code) for code in (LOW, HIGH)}
    counted |= {
        Counter.SKIPPED: skipped,
        Counter.HITS: hit,
        Counter.REUSES: hit & (computed != wanted),
        Counter.FETCHED_HIGH: fetched[HIGH],
        Counter.FETCHED_LOW: fetched[LOW],
        Counter.STREAMED: places == STREAM,
        Counter.CPU_EXECUTED: on_cpu,
        Counter.PROMOTIONS: ~hit & ~on_cpu & (wanted == HIGH) & (before == LOW),
        Counter.EVICTIONS: places >= 0,
    }
    for counter, those in counted.items():
        host.counters[layer, counter] += np.count_nonzero(those)
    if not large:
        lacks = (~hit & (host.staged[layer % 2, 0, 1, active] == wanted))[None]
        if host.nested:
            lacks = np.stack((before == ABSENT, (before != HIGH) & (wanted == HIGH)))
        _count_arrived(host, layer, active, lacks)
    _list_items(host, layer, active, computed, places, sizes, plan)
    if not large:  # a large batch reads it again
        host.staged_for[layer % 2] = -1
    list_positions(np.where(np.isin(chosen, active), chosen, -1), 1 if weights_on_input else top_k, plan)
    of_outputs = torch.ones_like(weights[:real]) if weights_on_input else weights[:real]
    plan.weights[:real] = of_outputs
    if host.renormalizes[0]:
        plan.weights[:real] = renormalized(of_outputs, plan.computed[:real] == 0, ids < 0)
    plan.computed.numpy().reshape(-1)[np.isin(chosen, active[on_cpu]).nonzero()] = 2


def _empty(plan: LayerPlan) -> None:
    for tensor in plan.tensors.values():
        tensor.zero_()
    plan.experts.fill_(-1)
    plan.slots.fill_(-1)
    plan.work[-1] = torch.tensor([-1, 0, len(plan.computed)])


def _choose(
    table: Table, layer: int, active: Ints, ids: Tensor, weights: Tensor, marks: Tensor | None,
    global_ids: Tensor | None,
) -> NDArray[np.int8]:  # fmt: skip
    """Choose LOW or HIGH for each active expert, and update the thresholds."""
    prompt = None if marks is None else PromptTokens(marks > 0, marks > 1, mixed=True)
    thresholds = (table.prompt_threshold, table.threshold) if table.threshold[1] >= 0 else ()
    everywhere, experts = (ids, table.experts) if global_ids is None else (global_ids, table.all_experts)
    phases = importance(everywhere, weights, experts, prompt)
    high = high_experts(phases, thresholds, table.critical[layer].__getitem__)
    if global_ids is None:
        return precisions_of(active, high)
    table.chosen.fill(LOW)
    table.chosen[list(own_experts(global_ids.numpy(), ids.numpy(), high))] = HIGH
    return table.chosen[active]


def precisions_of(active: Ints, high: Collection[int]) -> NDArray[np.int8]:
    """Return HIGH for the active experts in ``high``, LOW for the others."""
    return np.where(np.isin(active, list(high)), HIGH, LOW).astype(np.int8)


def slot_address(table: Table, layer: int, code: int, slot: int) -> int:
    return int(table.pool[layer, code]) + slot * int(table.slot_bytes[layer, code])


def bytes_ahead(table: Table, layer: int, code: int, projections: int) -> int:
    """Return the bytes of an expert's first projections when they are fetched ahead.

    All projections together take the whole slot.
    """
    whole = projections == PROJECTIONS
    return int(table.slot_bytes[layer, code] if whole else table.offsets[layer, code, projections])


def found_ahead(table: Table, layer: int, expert: int, code: int) -> tuple[int, int]:
    """Return the slot that a missing version, or slice, was fetched ahead into.

    Also returns how many projections were fetched. If it was not fetched ahead, the result is -1 and 0.
    """
    slot, precision, projections = table.staged[layer % 2, code - 1 if table.nested else 0, :, expert].tolist()
    found = table.staged_for[layer % 2] == layer and precision == code
    return (slot, projections) if found else (-1, 0)


def _fetched_ahead(table: Table, layer: int, active: Ints, wanted: NDArray[np.int8]) -> Ints:
    """Return how many projections came ahead: int64 [slices, n active experts]."""
    staged, codes = table.staged[layer % 2][:, :, active], wanted[None]
    if table.nested:
        codes = np.array([[LOW], [HIGH]], np.int8)
    found: Ints = np.where((staged[:, 1] == codes) & (table.staged_for[layer % 2] == layer), staged[:, 2], 0)
    return found.astype(np.int64)


def _count_arrived(table: Table, layer: int, active: Ints, lacks: NDArray[np.bool_]) -> None:
    """Count predicted slices that arrived, came late, or were cancelled.

    Args:
        lacks: bool [slices, n], which slices of the active experts are missed.
    """
    if table.staged_for[layer % 2] != layer:
        return
    for lacking, (_, codes, projections) in zip(lacks, table.staged[layer % 2], strict=True):
        arrived = projections.nonzero()[0].tolist()
        nbytes = sum(bytes_ahead(table, layer, int(codes[expert]), int(projections[expert])) for expert in arrived)
        table.counters[layer, [Counter.AHEAD, Counter.AHEAD_BYTES]] += len(arrived), nbytes
        missed = np.zeros(len(codes), bool)
        missed[active] = lacking
        absent = (codes > 0) & (projections == 0)
        counted = np.count_nonzero(absent & missed), np.count_nonzero(absent & ~missed)
        table.counters[layer, [Counter.LATE, Counter.CANCELLED]] += counted


def _list_items(
    table: Table, layer: int, active: Ints, computed: NDArray[np.int8], places: Ints, sizes: Ints, plan: LayerPlan
) -> None:
    """Write the plan's items: actions, sources, destinations and positions.

    Actions, sources and destinations are written for each slice, positions for each expert. The table's rows are those
    after the step. Projections that were fetched ahead are read from their staging slots. A streamed expert is read
    once for every POSITIONS_AT_ONCE positions; one with more positions that has to cross the link gets a staging slot,
    as long as there are some, because the link is slower than a slot.
    """
    predicted = table.prefetch_slots.tolist()
    staged = {
        code: [first + predicted[code], count - predicted[code]]
        for code, (first, count) in enumerate(table.staging[layer].tolist())
    }
    counts = table.counters[layer]
    plan.count.fill_(len(active))
    position = 0
    for item, (expert, code) in enumerate(zip(active.tolist(), computed.tolist(), strict=True)):
        plan.experts[item], plan.precisions[item] = expert, code
        plan.bits[item] = torch.from_numpy(table.bits[layer, code])
        for number, part in enumerate((LOW, HIGH)[:code] if table.nested else (code,)):
            place, at = int(places[number, item]), (number, item)
            action = {HIT: Action.HIT, STREAM: Action.STREAM, CPU: Action.CPU}.get(place, Action.ADMIT)
            ahead, projections = (
                (-1, 0) if action in (Action.HIT, Action.CPU) else found_ahead(table, layer, expert, part)
            )
            if projections:
                nbytes = bytes_ahead(table, layer, part, projections)
                counts[[Counter.AHEAD_USED, Counter.AHEAD_USED_BYTES]] += 1, nbytes
            slot = -1
            if action in (Action.HIT, Action.ADMIT):
                slot = int(table.slot[number, layer, expert])
            elif (
                action is Action.STREAM
                and projections < PROJECTIONS
                and sizes[expert] > POSITIONS_AT_ONCE
                and staged[part][1]
            ):
                slot, staged[part] = staged[part][0], [staged[part][0] + 1, staged[part][1] - 1]
            offsets, address = torch.from_numpy(table.offsets[layer, part]), slot_address(table, layer, part, slot)
            plan.slots[at], plan.action[at] = slot, action
            plan.addresses[at] = offsets + (address if action is Action.HIT else int(table.source[layer, expert, part]))
            plan.addresses[number, item, :projections] = offsets[:projections] + slot_address(table, layer, part, ahead)
            if action is not Action.HIT and slot >= 0:
                plan.destinations[at] = offsets + address
        here = 0 if places[0, item] == CPU else int(sizes[expert])
        plan.work[item] = torch.tensor((item, position, position + here))
        position += int(sizes[expert])


def list_positions(keys: Ints, pairs_of_row: int, plan: LayerPlan) -> None:
    """Write the pairs in stable order of their keys.

    Pairs with negative keys are not computed. A row of the input belongs to ``pairs_of_row`` pairs, top_k or 1.
    """
    pairs = (keys >= 0).nonzero()[0]
    pairs = pairs[np.argsort(keys[pairs], kind="stable")]
    plan.pairs.numpy()[: len(pairs)] = pairs
    plan.rows.numpy()[: len(pairs)] = pairs // pairs_of_row
    plan.computed.numpy().reshape(-1)[pairs] = 1
