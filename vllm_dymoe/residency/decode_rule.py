"""A layer's step decided at once, with NumPy: the plain twin of ``kernels/triton/decide.py``, bit for bit.

What is kept is the rule and nothing else. Around it are the choice of tiers (DyMoE 4.2 and 4.3), the slots,
and the work list.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.residency.constants import POSITIONS_AT_ONCE, WEIGHT_UNIT
from vllm_dymoe.residency.decision import KEPT, PASSED, STAYED, Decision
from vllm_dymoe.residency.decode_table import Counter, DecodeTable
from vllm_dymoe.residency.rule import FREE, HIGH, HIT, LOW, NOWHERE, STREAM, decide, decide_slices, record_uses

PROJECTIONS = 3
Ints = NDArray[np.int64]


def decide_plain(
    table: DecodeTable, layer: int, ids: Tensor, weights: Tensor, rows: Tensor, decision: Decision
) -> None:
    """Decide a layer's step: changes the table's rows, and says in `decision` what is to be computed from where.

    A step without rows changes nothing of the table.

    Args:
        table: on a CPU, like everything else.
        layer: position among the MoE layers.
        ids: int32 or int64 [tokens, top_k]; negative where another rank has the expert.
        weights: float32 [tokens, top_k].
        rows: int32 [1], how many tokens are real, the first ones.
        decision: for so many tokens, overwritten.
    """
    _empty(decision)
    real, top_k = int(rows), ids.shape[1]
    if not real:
        return
    _record(table, layer, ids[:real], weights[:real])
    chosen = ids[:real].numpy().astype(np.int64).reshape(-1)
    sizes = np.bincount(chosen[chosen >= 0], minlength=table.experts)
    active = sizes.nonzero()[0]
    wanted = choose_tiers(table, layer, active, sum_weights(table.experts, chosen, weights[:real].numpy().reshape(-1)))
    counts = table.counters.numpy()[layer]
    counts[Counter.STEPS] += 1
    counts[Counter.WANTED_HIGH] += np.count_nonzero(wanted == HIGH)
    counts[Counter.WANTED_LOW] += np.count_nonzero(wanted == LOW)
    skipped = table.bits.numpy()[wanted] == 0
    counts[Counter.SKIPPED] += np.count_nonzero(skipped)
    active, wanted = active[~skipped], wanted[~skipped]
    step = table.step.numpy()
    step[layer] += 1
    held, heat, used_at = (values.numpy()[layer] for values in (table.tier, table.heat, table.used_at))
    record_uses(heat, used_at, active, int(step[layer]))
    shares = table.shares.numpy()[layer].tolist()
    before = held[active]
    reuse = bool(table.reuse_high[0])
    if table.nested:
        fine_heat, fine_used_at = table.fine_heat.numpy()[layer], table.fine_used_at.numpy()[layer]
        record_uses(fine_heat, fine_used_at, active[wanted == HIGH], int(step[layer]))
        heats, uses = (heat, fine_heat), (used_at, fine_used_at)
        low_places, high_places = decide_slices(active, wanted, held, heats, uses, shares)
        hit = (low_places == HIT) & (high_places == HIT)
        computed = np.where(reuse & hit, before, wanted)
    else:
        places = decide(active, wanted, held, heat, used_at, shares, reuse_high=reuse)
        hit = places == HIT
        low_places, high_places = (np.where(wanted == code, places, HIT) for code in (LOW, HIGH))
        computed = np.where(hit, before, wanted)
    counts[Counter.HITS] += np.count_nonzero(hit)
    counts[Counter.REUSES] += np.count_nonzero(hit & (computed != wanted))
    counts[Counter.PROMOTIONS] += np.count_nonzero(~hit & (wanted == HIGH) & (before == LOW))
    for counter, places in ((Counter.FETCHED_HIGH, high_places), (Counter.FETCHED_LOW, low_places)):
        counts[counter] += np.count_nonzero(places != HIT)
        counts[Counter.PASSED] += np.count_nonzero(places == STREAM)
        counts[Counter.EVICTIONS] += np.count_nonzero(places >= 0)
    _give(table, layer, active, (low_places, high_places))
    _list_items(table, layer, active, computed, (low_places, high_places), sizes, decision)
    _list_positions(active, chosen, top_k, decision)


def _empty(decision: Decision) -> None:
    for tensor in decision.tensors.values():
        tensor.zero_()
    decision.experts.fill_(-1)
    decision.slots.fill_(-1)
    decision.work[-1] = torch.tensor([-1, 0, len(decision.computed)])


def _record(table: DecodeTable, layer: int, ids: Tensor, weights: Tensor) -> None:
    """Into the ring, if somebody records; the step is the one that begins."""
    if table.recording[0]:
        at = (int(table.step[layer]) + 1) % len(table.ring_ids)
        table.ring_ids[at, layer, : len(ids)] = ids
        table.ring_weights[at, layer, : len(ids)] = weights
        table.ring_rows[at, layer] = len(ids)


def sum_weights(experts: int, chosen: Ints, weights: NDArray[np.float32]) -> Ints:
    """int64 [experts], the sum of each expert's weights in units of 1 / WEIGHT_UNIT: no order of additions decides."""
    units = (weights * np.float32(WEIGHT_UNIT)).astype(np.int64)
    sums = np.zeros(experts, np.int64)
    np.add.at(sums, chosen[chosen >= 0], units[chosen >= 0])
    return sums


def choose_tiers(table: DecodeTable, layer: int, active: Ints, sums: Ints) -> NDArray[np.int8]:
    """High for the most important experts, as many as are critical (Eq. 3 and 5); of equal ones the first.

    Sums are compared as float32: what host code that sums in float64 and rounds finds, too.
    """
    importance = sums[active].astype(np.float32)
    critical = int(table.critical[layer, len(active)])
    wanted = np.full(len(active), LOW, np.int8)
    wanted[np.argsort(-importance, kind="stable")[:critical]] = HIGH
    return wanted


def slot_address(table: DecodeTable, code: int, slot: int) -> int:
    """Where a slot of a tier's pool begins."""
    return int(table.pool[code]) + slot * int(table.slot_bytes[code])


def bytes_ahead(table: DecodeTable, code: int, projections: int) -> int:
    """Of an expert of whose projections the first ones are fetched ahead."""
    return int(table.slot_bytes[code] if projections == PROJECTIONS else table.offsets[code, projections])


def _found_ahead(table: DecodeTable, layer: int, expert: int, code: int) -> tuple[int, int]:
    """Where a missing expert was fetched ahead, and how many of its projections."""
    half = layer % 2
    slot, tier, projections = table.staged[half, :, expert].tolist()
    return (slot, projections) if table.staged_for[half] == layer and tier == code else (-1, 0)


def _give(table: DecodeTable, layer: int, active: Ints, places: tuple[Ints, Ints]) -> None:
    """Write the rows of what is kept, one pool after the other: free slots are taken in ascending order.

    Bases come before fine slices, because who loses its base loses both.
    """
    nested, tier = table.nested, table.tier.numpy()[layer]
    for code in (LOW, HIGH) if nested else (HIGH, LOW):
        given = places[code - 1]
        slot = (table.fine if nested and code == HIGH else table.slot).numpy()[layer]
        first, share = int(table.first_slot[layer, code]), int(table.shares[layer, code])
        own = np.arange(first, first + share, dtype=np.int32)
        free = iter(own[~np.isin(own, slot[tier >= code if nested else tier == code])].tolist())
        for number in ((given == FREE) | (given >= 0)).nonzero()[0].tolist():
            expert, victim = active[number], given[number]
            taken = next(free) if victim == FREE else slot[victim]
            if victim != FREE:
                tier[victim], slot[victim] = code - 1 if nested else NOWHERE, -1
            tier[expert], slot[expert] = code, taken
        if nested and code == LOW:
            table.fine.numpy()[layer][tier == NOWHERE] = -1


def _list_items(
    table: DecodeTable,
    layer: int,
    active: Ints,
    computed: NDArray[np.int8],
    places: tuple[Ints, Ints],
    sizes: Ints,
    decision: Decision,
) -> None:
    """What is read from where, and where it goes.

    A miss is read from where it was fetched ahead, as far as it was. One that passes is read once for every two of its
    positions. With more of them, and if the link has to be crossed, it has a staging slot, as long as there are some:
    the link is slower than the slot.

    Args:
        table: its rows are those after the step, like what follows.
        layer: position among the MoE layers.
        active: the experts.
        computed: the version of each.
        places: what becomes of low versions, or of bases, and of high ones, or of fine slices.
        sizes: positions of each expert of the layer.
        decision: written.
    """
    staged = dict(enumerate(table.staging.tolist()))
    counts = table.counters.numpy()[layer]
    decision.count.fill_(len(active))
    position = 0
    for item, (expert, code) in enumerate(zip(active.tolist(), computed.tolist(), strict=True)):
        decision.experts[item], decision.tiers[item] = expert, code
        decision.bits[item] = table.bits[code]
        for number, part in enumerate((LOW, HIGH)[:code] if table.nested else (code,)):
            at = number, item
            place = int(places[part - 1][item])
            fate = STAYED if place == HIT else PASSED if place == STREAM else KEPT
            ahead, projections = -1, 0
            if fate != STAYED and not table.nested:
                ahead, projections = _found_ahead(table, layer, expert, code)
            if projections:
                counts[[Counter.AHEAD_USED, Counter.AHEAD_USED_BYTES]] += 1, bytes_ahead(table, code, projections)
            slot = -1
            if fate != PASSED:
                slot = int((table.fine if table.nested and part == HIGH else table.slot)[layer, expert])
            elif projections < PROJECTIONS and sizes[expert] > POSITIONS_AT_ONCE and staged[part][1]:
                slot, staged[part] = staged[part][0], [staged[part][0] + 1, staged[part][1] - 1]
            offsets = table.offsets[part]
            there = slot_address(table, part, slot)
            decision.slots[at], decision.fate[at] = slot, fate
            source = there if fate == STAYED else table.source[layer, expert, part]
            decision.addresses[at] = offsets + source
            decision.addresses[number, item, :projections] = offsets[:projections] + slot_address(table, part, ahead)
            if fate != STAYED and slot >= 0:
                decision.destinations[at] = offsets + there
        for column, value in enumerate((item, position, position + sizes[expert])):
            decision.work[item, column] = int(value)
        position += sizes[expert]


def _list_positions(active: Ints, chosen: Ints, top_k: int, decision: Decision) -> None:
    pairs = np.isin(chosen, active).nonzero()[0]
    pairs = pairs[np.argsort(chosen[pairs], kind="stable")]
    decision.pairs.numpy()[: len(pairs)] = pairs
    decision.rows.numpy()[: len(pairs)] = pairs // top_k
    decision.computed.numpy().reshape(-1)[pairs] = 1
