"""Memory whose rows the host plans between steps, where decode steps run without the host.

The host's table is the truth, and there is no other writer: the device's table is its copy, the stable handle that
captured graphs read (DynaExq 3.2). Every expert is there, so that a step of the device decides nothing and only counts.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.residency.decode_table import DecodeTable
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.rule import HIGH
from vllm_dymoe.residency.slots import Slot, SlotPool
from vllm_dymoe.residency.table import ResidencyTable
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.decided_memory import DecidedMemory
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.sizing import SlotPlan


class PlannedMemory(DecidedMemory):
    """See the module; steps of the host and of the device go by the same rows."""

    make_table = ResidencyTable

    def allocate(self, plan: SlotPlan, bits: Mapping[Tier, int], *, reuse_high: bool) -> None:
        """See ExpertMemory."""
        super().allocate(plan, bits, reuse_high=reuse_high)
        self.streaming = True

    def make_pool(self, fmt: Format, count: int, promised: int) -> SlotPool:
        """See ExpertMemory."""
        return ExpertMemory.make_pool(self, fmt, count, promised)

    def _fill_if_complete(self) -> None:
        """Nothing: experts come before the first request."""

    def rows_changed(self, layer: int) -> None:
        """Copy a layer's rows to the device, behind all that computes and before what is launched or replayed next."""
        names = ("tier", "slot", "fine") if self.nested else ("tier", "slot")
        for name in names:
            row = torch.from_numpy(getattr(self.table, name)[layer].copy())  # may change before it is copied
            getattr(self.decisions, name)[layer].copy_(row, non_blocking=True)

    def check_integrity(self, in_flight: Iterable[tuple[Tier, Slot, bool]]) -> None:
        """See ExpertMemory; waits for the device."""
        ExpertMemory.check_integrity(self, in_flight)
        for name in ("tier", "slot", "fine") if self.nested else ("tier", "slot"):
            there = getattr(self.decisions, name).cpu().numpy()
            assert np.array_equal(there, getattr(self.table, name)), "the device reads other rows than the host"

    def enter_stream(self, last_read: Any) -> None:
        """Nothing: both kinds of steps read the same rows."""

    def enter_decode(self) -> bool:
        """False: copies of the host go on."""
        return False


class DecodeCounts:
    """What routers chose in steps without the host: counted on the device, read by the host without waiting.

    Args:
        table: keeps the choices of the last step.
    """

    def __init__(self, table: DecodeTable) -> None:
        self._table = table
        self._bins = table.layers * table.experts + 1  # the last one for experts of other ranks
        device = table.tier.device
        self._uses = torch.zeros(2 * self._bins, dtype=torch.int64, device=device)
        self._first = (torch.arange(table.layers, device=device) * table.experts).view(-1, 1, 1)
        pinned = device.type == "cuda"
        self._there = torch.zeros(2 * self._bins, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._event = torch.cuda.Event() if pinned else None

    def add(self, tokens: int) -> int:
        """Count a step that has run, or is going to on the computing stream; returns its choices of all ranks."""
        ids = self._table.ring_ids[0, :, :tokens].long()
        place = torch.where(ids >= 0, ids + self._first, self._bins - 1)
        high = self._table.tier.flatten()[place.clamp(max=self._bins - 2)] == HIGH
        index = (place + self._bins * high).flatten()
        self._uses.scatter_add_(0, index, torch.ones_like(index))
        return index.numel()

    def ask(self) -> None:
        """Count anew from the next step on, and send what there is to the host."""
        self._there.copy_(self._uses, non_blocking=True)
        self._uses.zero_()
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """Whether what was asked for is there."""
        return self._event is None or self._event.query()

    def take(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What low and high versions served until ``ask``: choices, int64 [layers, experts]."""
        low, high = self._there.numpy().copy().reshape(2, self._bins)[:, :-1]
        shape = self._table.layers, self._table.experts
        return low.reshape(shape), high.reshape(shape)
