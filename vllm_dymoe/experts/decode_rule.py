"""A layer's step decided at once, with NumPy: the plain twin of ``kernels/triton/decide.py``, bit for bit.

What is kept is ``residency``'s rule and nothing else. Around it are the choice of tiers (DyMoE 4.2 and 4.3), the slots,
and the work list.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.experts.decode_table import KEPT, PASSED, STAYED, Counter, Decision, DecodeTable
from vllm_dymoe.experts.residency import FREE, HIGH, HIT, LOW, NOWHERE, STREAM, decide, record_uses
from vllm_dymoe.kernels.decode import POSITIONS_AT_ONCE, WEIGHT_UNIT

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
    wanted = _tiers(table, layer, active, chosen, weights[:real].numpy().reshape(-1))
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
    places = decide(active, wanted, held, heat, used_at, shares, reuse_high=bool(table.reuse_high[0]))
    hit = places == HIT
    before = held[active]
    counts[Counter.HITS] += np.count_nonzero(hit)
    counts[Counter.REUSES] += np.count_nonzero(hit & (before != wanted))
    counts[Counter.FETCHED_HIGH] += np.count_nonzero(~hit & (wanted == HIGH))
    counts[Counter.FETCHED_LOW] += np.count_nonzero(~hit & (wanted == LOW))
    counts[Counter.PASSED] += np.count_nonzero(places == STREAM)
    counts[Counter.PROMOTIONS] += np.count_nonzero(~hit & (wanted == HIGH) & (before == LOW))
    counts[Counter.EVICTIONS] += np.count_nonzero(places >= 0)
    _give_slots(table, layer, active, wanted, places)
    _list_items(table, layer, active, np.where(hit, before, wanted), places, sizes, decision)
    _list_positions(active, chosen, top_k, decision)


def _empty(decision: Decision) -> None:
    for tensor in vars(decision).values():
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


def _tiers(
    table: DecodeTable, layer: int, active: Ints, chosen: Ints, weights: NDArray[np.float32]
) -> NDArray[np.int8]:
    """High for the most important experts, as many as are critical (Eq. 3 and 5); of equal ones the first.

    Weights are summed as integers, so that no order of additions can decide, and compared as float32: what host code
    that sums in float64 and rounds finds, too.
    """
    units = (weights * np.float32(WEIGHT_UNIT)).astype(np.int64)
    sums = np.zeros(table.experts, np.int64)
    np.add.at(sums, chosen[chosen >= 0], units[chosen >= 0])
    importance = sums[active].astype(np.float32)
    critical = int(table.critical[layer, len(active)])
    wanted = np.full(len(active), LOW, np.int8)
    wanted[np.argsort(-importance, kind="stable")[:critical]] = HIGH
    return wanted


def _give_slots(table: DecodeTable, layer: int, active: Ints, wanted: NDArray[np.int8], places: Ints) -> None:
    """Write the rows of experts that are kept: free slots are taken in ascending order."""
    tier, slot = table.tier.numpy()[layer], table.slot.numpy()[layer]
    for code in (HIGH, LOW):
        first, share = int(table.first_slot[layer, code]), int(table.shares[layer, code])
        own = np.arange(first, first + share, dtype=np.int32)
        free = iter(own[~np.isin(own, slot[tier == code])].tolist())
        for number in ((wanted == code) & ((places == FREE) | (places >= 0))).nonzero()[0].tolist():
            expert, victim = active[number], places[number]
            taken = next(free) if victim == FREE else slot[victim]
            if victim != FREE:
                tier[victim], slot[victim] = NOWHERE, -1
            tier[expert], slot[expert] = code, taken


def _list_items(
    table: DecodeTable,
    layer: int,
    active: Ints,
    computed: NDArray[np.int8],
    places: Ints,
    sizes: Ints,
    decision: Decision,
) -> None:
    """What is read from where, and where it goes.

    An expert that passes is read through, once for every two of its positions. One with more of them has a staging
    slot, as long as there are some: the link is slower than the slot.
    """
    staged = dict(enumerate(table.staging.tolist()))
    decision.count.fill_(len(active))
    position = 0
    for item, (expert, code, place) in enumerate(zip(active.tolist(), computed.tolist(), places.tolist(), strict=True)):
        fate = STAYED if place == HIT else PASSED if place == STREAM else KEPT
        slot = -1 if fate == PASSED else int(table.slot[layer, expert])
        if fate == PASSED and sizes[expert] > POSITIONS_AT_ONCE and staged[code][1]:
            slot, staged[code] = staged[code][0], [staged[code][0] + 1, staged[code][1] - 1]
        offsets = table.offsets[code]
        there = int(table.pool[code]) + slot * int(table.slot_bytes[code])
        decision.experts[item], decision.tiers[item], decision.slots[item], decision.fate[item] = (
            expert,
            code,
            slot,
            fate,
        )
        decision.bits[item] = table.bits[code]
        decision.addresses[item] = offsets + (there if fate == STAYED else table.source[layer, expert, code])
        if fate != STAYED and slot >= 0:
            decision.destinations[item] = offsets + there
        for column, value in enumerate((item, position, position + sizes[expert])):
            decision.work[item, column] = int(value)
        position += sizes[expert]


def _list_positions(active: Ints, chosen: Ints, top_k: int, decision: Decision) -> None:
    pairs = np.isin(chosen, active).nonzero()[0]
    pairs = pairs[np.argsort(chosen[pairs], kind="stable")]
    decision.pairs.numpy()[: len(pairs)] = pairs
    decision.rows.numpy()[: len(pairs)] = pairs // top_k
    decision.computed.numpy().reshape(-1)[pairs] = 1
