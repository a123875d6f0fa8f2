"""Prefetch with device-side planning, with NumPy.

This is the plain twin of ``kernels/triton/prefetch.py``, bit for bit. After a layer of a small-batch step was computed,
the link is idle until the next layer has been routed. Meanwhile predicted experts of the next layer are copied into
staging slots:

  compute stream | plan L | compute L |   attention, router   | plan L+1 | compute L+1 | ...
  branch                  | predict   | list | copies for L+1 | stops

``Table.predicted`` names the experts. The list is made before the next layer is planned. Experts that have arrived by
then are hits in staging slots. Copies stop when the plan begins, so that no demand waits for a prediction; an expert
that has not arrived is an ordinary miss. Each projection is a copy: the time of a layer brings about one expert over a
link, and less without its last bytes would bring none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vllm_dymoe.planner.constants import PROJECTIONS, experts_width
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.small_batch import bytes_ahead, slot_address
from vllm_dymoe.planner.table import Table

_NONE: Mapping[int, int] = MappingProxyType({})
NAMED, UNITS, MOST_SCORE = 1 << 40, 1 << 30, 4
"""Of a tally: what a token adds for an expert that it would choose, the units of its score, and the largest score."""

MOST_AHEAD = 2  # layers that a device fetches for: an even and an odd one


class PredictionCount(IntEnum):
    """Columns of :attr:`PrefetchList.counts`.

    Only experts of layers for which there were predictions count.
    """

    ASKED = 0  # steps, not experts
    PREDICTED = auto()
    NEEDED = auto()  # that the router chose
    CORRECT = auto()  # that are both
    HELD = auto()  # needed ones that the layer held before
    UNUSED = auto()  # predicted ones that it did not hold and did not need


@dataclass(frozen=True, eq=False)
class PrefetchList:
    """The copies of one layer's predicted experts, and what predictions were worth.

    Copies are in the order in which they are made.
    """

    copies: Tensor  # int64 [any, 5]: source, destination, bytes, place in ``Table.staged``, and what that says then
    count: Tensor  # int32 [1], number of copies
    arrivals: Tensor  # int32 [any], scratch: programs that have made their part of a copy
    held: Tensor  # int32 [2, experts], 1 for experts of an even and an odd layer that it held when its list was made
    counts: Tensor  # int64 [layers, PredictionCount], since the start
    scratch: Tensor  # int64 [2 * width], contents do not matter

    @classmethod
    def allocate(cls, experts: int, device: torch.device | str, *, layers: int = 1, slices: int = 1) -> Self:
        """Allocate for the layers of a table.

        ``experts`` 0 allocates a list that can hold nothing.
        """
        ints: Any = {"dtype": torch.int32, "device": device}
        longs: Any = {"dtype": torch.int64, "device": device}
        return cls(
            torch.zeros(MOST_AHEAD * slices * experts * PROJECTIONS, 5, **longs),
            torch.zeros(1, **ints),
            torch.zeros(MOST_AHEAD * slices * experts * PROJECTIONS, **ints),
            torch.zeros(2, experts, **ints),
            torch.zeros(layers if experts else 0, len(PredictionCount), **longs),
            torch.zeros(2 * experts_width(experts) if experts else 0, **longs),
        )


def name_experts(
    table: Table, target: int, layer: int, scores: Tensor, rows: Tensor, asked: Tensor, numbers: Tensor
) -> None:
    """Write the experts that a step's tokens would choose into ``Table.predicted``.

    They are named for a coming layer, the best first. A token chooses K experts of the largest scores; with several
    voters only those that each of P voters names (FIRM-MoE Eqs. 5 and 6). Experts that more tokens choose come first,
    then those of larger sums of scores (DyMoE Eq. 7). Scores are compared as they are, and added as integers.

    Args:
        table: on a CPU, like all other arguments.
        target: the coming layer, which is named for.
        layer: the running one. The scores of the voter ``n`` layers before it are at ``(layer - n) % voters``.
        scores: float32 [voters, tokens, experts of all ranks]; NaN and -inf are chosen by nobody.
        rows: int32 [1], number of real tokens; at most all of the rows are.
        asked: int32 [layers, 2], K and P of each coming layer.
        numbers: int32 [layers, experts of all ranks], this rank's number of each, negative for another rank's.
    """
    host, real = table.on_host(), min(int(rows), scores.shape[1])
    most, voting = asked[target].tolist()
    found = np.where(np.isnan(scores.numpy()), -np.inf, scores.numpy())
    tally = np.zeros(found.shape[2], np.int64)
    for token in range(real):
        chosen = np.ones(len(tally), bool)
        for voter in range(min(voting, layer + 1, len(found))):
            own = found[(layer - voter) % len(found), token]
            place = np.empty(len(own), np.int64)
            place[np.argsort(-own, kind="stable")] = np.arange(len(own))
            chosen &= (place < most) & (own > -np.inf)
        score = np.clip(found[layer % len(found), token], -MOST_SCORE, MOST_SCORE) * np.float32(UNITS)
        tally += np.where(chosen, NAMED + score.astype(np.int64), 0)
    number = numbers[target].numpy()
    tally[number < 0] = 0
    order = np.argsort(-tally, kind="stable")[: np.count_nonzero(tally)]
    high, fetched = host.fetched_ahead[:, target, len(order)].tolist()
    host.predicted[0, target] = -1
    host.predicted[0, target, :fetched] = number[order[:fetched]]
    host.predicted[1, target] = np.where(np.arange(host.experts) < high, HIGH, LOW)


def judge_predicted(table: Table, layer: int, ids: Tensor, rows: Tensor, listed: PrefetchList) -> None:
    """Count what the predictions for a layer were worth, now that it was routed.

    Args:
        table: on a CPU, like all other arguments.
        ids: int [tokens, top_k], negative where another rank has the expert.
        rows: int32 [1], number of real tokens; without any nothing is counted.
        listed: of the layer; ``counts`` are added to.
    """
    host, real = table.on_host(), min(int(rows), len(ids))
    if not real:
        return
    chosen, predicted = np.zeros((2, host.experts), bool)
    wanted = ids[:real].numpy()
    chosen[wanted[(wanted >= 0) & (wanted < host.experts)]] = True
    named = host.predicted[0, layer]
    predicted[named[: np.argmax(named < 0) if (named < 0).any() else len(named)]] = True
    held = listed.held[layer % 2].numpy() > 0
    counted = {
        PredictionCount.ASKED: 1,
        PredictionCount.PREDICTED: predicted,
        PredictionCount.NEEDED: chosen,
        PredictionCount.CORRECT: predicted & chosen,
        PredictionCount.HELD: chosen & held,
        PredictionCount.UNUSED: predicted & ~held & ~chosen,
    }
    for count, those in counted.items():
        listed.counts[layer, count] += int(np.count_nonzero(those))


def list_predicted(
    table: Table, layer: int, rows: Tensor, projections: int, out: PrefetchList, look_ahead: int = 1
) -> None:
    """List the copies of predicted experts that their layers do not hold.

    As many are listed as there are slots for. A coming layer's half of ``Table.staged`` is rewritten: slot and version
    of each, and no projection until it has arrived. What has arrived for the next layer since it was the second next
    one stays.

    Args:
        table: on a CPU, like all other arguments.
        layer: the next one to be planned.
        rows: int32 [1], number of real tokens; if 0, nothing is listed.
        projections: how many projections of an expert are copied, gate first.
        out: overwritten.
        look_ahead: 1, or 2 to list copies for the layer after the next one, after those for the next.
    """
    host, listed, width = table.on_host(), 0, experts_width(table.experts)
    arrived = (host.staged[layer % 2, :, 2] > 0) & bool(look_ahead > 1 and host.staged_for[layer % 2] == layer)
    host.staged[layer % 2] *= arrived[:, None]
    slots = {part: int(host.prefetch_slots[part]) for part in (LOW, HIGH)}
    free: dict[int, list[int]] = {}
    for part, most in slots.items():
        first, number = int(host.staging[layer, part, 0]), part - 1 if host.nested else 0
        taken = arrived[number] & (host.staged[layer % 2, number, 1] == part)
        kept = set((host.staged[layer % 2, number, 0][taken] - first).tolist())
        free[part] = [slot for slot in range(most if look_ahead == 1 else min(most, width)) if slot not in kept]
    out.arrivals.zero_()
    out.held[layer % 2] = torch.from_numpy((host.precision[layer] != ABSENT).astype(np.int32))
    for later in range(layer, min(layer + look_ahead, host.layers)):
        half = later % 2
        if (host.slot_bytes[later] != host.slot_bytes[layer]).any():
            break  # a slot of another size is another place
        if later > layer:
            host.staged[half] = 0
        host.staged_for[half] = later
        experts, codes = host.predicted[:, later].tolist()
        ends = next((number for number, expert in enumerate(experts) if expert < 0), len(experts))
        for expert, code in zip(experts[:ends], codes, strict=False):
            if not int(rows) or code not in slots:
                continue
            for part in _lacking(host, int(host.precision[later, expert]), code):
                number = part - 1 if host.nested else 0
                if not free[part] or host.staged[half, number, 2, expert]:
                    continue
                slot = int(host.staging[later, part, 0]) + free[part].pop(0)
                host.staged[half, number, :2, expert] = slot, part
                source, destination = int(host.source[later, expert, part]), slot_address(host, later, part, slot)
                place = ((half * len(host.slot) + number) * 3 + 2) * host.experts + expert
                for projection in range(projections):
                    begin, end = (bytes_ahead(host, later, part, projection + n) for n in range(2))
                    copy = source + begin, destination + begin, end - begin, place, projection + 1
                    out.copies[listed] = torch.tensor(copy)
                    listed += 1
    out.count.fill_(listed)


def _lacking(table: Table, held: int, code: int) -> tuple[int, ...]:
    """Return the versions, or slices, that an expert lacks to serve as predicted."""
    if not table.nested:
        return () if held != ABSENT else (code,)
    return tuple(part for part in (LOW, HIGH) if held < part <= code)


def publish(table: Table, place: int, projections: int) -> None:
    """Record that so many projections of a listed copy have arrived."""
    table.staged.view(-1)[place] = projections


def prefetch_slots(staging: int) -> int:
    """Return how many of ``staging`` slots predictions may fill.

    The others are for experts of several tokens.
    """
    return staging - staging // 4


def set_prefetch(table: Table, staging: Mapping[int, int], spare: Mapping[int, int] = _NONE) -> None:
    """Write ``Table.prefetch_slots`` for so many staging slots of LOW and HIGH.

    Nothing is prefetched without any. Those that are ``spare`` belong to others, and no step streams through them
    either.
    """
    slots = [spare.get(code, prefetch_slots(staging.get(code, 0))) for code in (ABSENT, LOW, HIGH)]
    table.prefetch_slots.copy_(torch.tensor(slots, dtype=torch.int32))
