"""Prefetch with device-side planning, with NumPy: the plain twin of ``kernels/triton/prefetch.py``, bit for bit.

After a layer of a small-batch step was computed the link is idle until the next layer has been routed. Meanwhile
predicted experts of the next layer are copied into staging slots:

    compute stream | plan L | compute L |   attention, router   | plan L+1 | compute L+1 | ...
    branch                  | predict   | list | copies for L+1 | stops

``Table.predicted`` names the experts. The list is made before the next layer is planned. What has arrived by then is a
hit on a staging slot; copies stop when the plan begins, so that a demand does not wait for a prediction. An expert that
has not arrived is an ordinary miss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.small_batch import bytes_ahead, slot_address
from vllm_dymoe.planner.table import Table

_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class PrefetchList:
    """The copies of one layer's predicted experts, in the order in which they are made."""

    copies: Tensor  # int64 [experts, 4]: source address, destination address, bytes, expert
    count: Tensor  # int32 [1], how many there are
    arrivals: Tensor  # int32 [experts], scratch: programs that have made their part of a copy

    @classmethod
    def allocate(cls, experts: int, device: torch.device | str) -> Self:
        ints: Any = {"dtype": torch.int32, "device": device}
        copies = torch.zeros(experts, 4, dtype=torch.int64, device=device)
        return cls(copies, torch.zeros(1, **ints), torch.zeros(experts, **ints))


def list_predicted(table: Table, layer: int, rows: Tensor, projections: int, out: PrefetchList) -> None:
    """List the copies of a layer's predicted experts that it does not hold, as many as there are slots for.

    The layer's half of ``Table.staged`` is rewritten: slot and version of each, and no projection until it has arrived.

    Args:
        table: on a CPU, like all other arguments.
        rows: int32 [1], number of real tokens; without any nothing is listed.
        projections: how many of an expert are copied, gate first.
        out: overwritten.
    """
    host, half, listed = table.on_host(), layer % 2, 0
    host.staged[half] = 0
    host.staged_for[half] = layer
    out.arrivals.zero_()
    taken = dict.fromkeys((LOW, HIGH), 0)
    experts, codes = host.predicted[:, layer].tolist()
    ends = next((number for number, expert in enumerate(experts) if expert < 0), len(experts))
    for expert, code in zip(experts[:ends], codes, strict=False):
        if not int(rows) or code not in taken or host.precision[layer, expert] != ABSENT:
            continue
        if taken[code] >= host.prefetch_slots[code]:
            continue
        slot = int(host.staging[code, 0]) + taken[code]
        taken[code] += 1
        host.staged[half, :2, expert] = slot, code
        copy = (
            int(host.source[layer, expert, code]),
            slot_address(host, code, slot),
            bytes_ahead(host, code, projections),
        )
        out.copies[listed] = torch.tensor((*copy, expert))
        listed += 1
    out.count.fill_(listed)


def publish(table: Table, layer: int, expert: int, projections: int) -> None:
    """Say that so many projections of a listed expert have arrived, unless its layer was planned in the meantime."""
    table.staged[layer % 2, 2, expert] = projections


def prefetch_slots(staging: int) -> int:
    """Return how many of so many staging slots predictions may fill; the others are for experts of several tokens."""
    return staging - staging // 4


def set_prefetch(table: Table, staging: Mapping[int, int], spare: Mapping[int, int] = _NONE) -> None:
    """Write ``Table.prefetch_slots`` for so many staging slots of LOW and HIGH; nothing is prefetched without any.

    Those that are ``spare`` belong to others, and no step streams through them either.
    """
    slots = [spare.get(code, prefetch_slots(staging.get(code, 0))) for code in (ABSENT, LOW, HIGH)]
    table.prefetch_slots.copy_(torch.tensor(slots, dtype=torch.int32))
