"""The cache of a device: slots, table and budget."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_dymoe.cache.budget import SlotPlan
from vllm_dymoe.cache.device_memory import DeviceMemory
from vllm_dymoe.cache.device_table import DeviceTable
from vllm_dymoe.cache.expert_cache import ExpertCache
from vllm_dymoe.cache.slots import Arena, Slot, SlotPool
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, PackedExpert, SliceKey
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import CODES, Table, check_integrity, set_pools


class Writer(StrEnum):
    """Who writes the table's rows."""

    HOST = "host"  # the host, in every step; there is no other table
    DEVICE = "device"
    """The device, in every step. Each layer has its own range of slots, followed by the staging slots. The host has
    a copy of the rows, updated on request.
    """
    PLANNER = "planner"
    """The host, between steps. The device, if it plans, has a copy of the rows. Every expert is resident, so
    device-planned steps only count uses.
    """


class Budget(NamedTuple):
    """Device bytes: the limit for experts, and those in use."""

    limit: int
    reserved: int


class SlotPools(dict[Precision, SlotPool]):
    """The slots of one plan by precision, the high one first.

    Raises ConfigError if their memory cannot be allocated.

    Attributes:
        bits: bits in the slots of each precision, as the experts' formats are named.
    """

    def __init__(
        self, plan: SlotPlan, experts: ModelExperts, bits: Mapping[Precision, int], device: torch.device,
        device_memory: DeviceMemory,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bits = {precision: bits[precision] for precision in plan.slots}
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # for messages
        try:
            for precision in plan.slots:
                kinds = list[SlotPool]()
                for kind, count in enumerate(plan.slots_of_kinds(precision)):
                    quotas = zip(experts.kinds, plan.quotas[precision], strict=True)
                    reserved = sum(quota for own, quota in quotas if own == kind)
                    kinds.append(self._make(experts.of_kinds[kind][bits[precision]], count, reserved))
                self[precision] = SlotPool.of_kinds(experts.formats[bits[precision]], kinds)
        except ConfigError:
            self.free()
            raise

    def _make(self, fmt: ExpertFormat, count: int, reserved: int) -> SlotPool:
        nbytes, available = count * fmt.nbytes, self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or stop other processes.",
                option="expert_budget",
            )
        try:
            arena = Arena(nbytes, device=None if self._device.type == "cpu" else self._device)
            # Touch the pages now: otherwise a machine short of memory would kill the process later.
            arena.memory.fill_(0)
        except (RuntimeError, OSError) as error:  # includes torch.OutOfMemoryError
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, but the "
                f"allocation failed ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "stop other processes.",
                option="expert_budget",
            ) from error
        return SlotPool(fmt, [arena], reserved)

    def fence(self, filled: Any) -> None:
        for pool in self.values():
            pool.fence(filled)

    @property
    def available(self) -> int:
        return self._device_memory.available()

    def free(self) -> None:
        for pool in self.values():
            pool.close()
        self.clear()
        self._device_memory.available()

    def check_growth(self, plan: SlotPlan, before: SlotPlan, nbytes: int) -> None:
        """Raise ConfigError if slots of ``nbytes`` bytes do not fit.

        They must fit in addition to what computation takes. The old slots, which still exist, count as free.
        """
        if plan.limit <= before.limit:  # the device has provided as much before
            return
        wanted = nbytes
        held = sum(pool.nbytes for pool in self.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; the "
                f"present ones take {held}, {available} bytes are free, and computation needs {computation} of these; "
                f"set expert_budget to at most {room + plan.workspace_bytes} bytes.",
                option="expert_budget",
            )


class DeviceCache(ExpertCache):
    """The device memory of one rank's experts, for one slot plan.

    Another plan needs another cache. No expert is resident at first, except with device-side planning if every expert
    has a slot. AssertionError if the plan exceeds its budget.

    Args:
        plan: how the budget is divided.
        pools: the plan's slots.
        device_table: the table of device-planned steps, whose rows are emptied; None if the host is the writer.
        reuse_high: a high version serves where a low one is wanted.

    Attributes:
        budget: the limit and the bytes in use.
        parts: pools from which an expert of a precision needs a slot.
        quotas: slots of each layer, by LOW and HIGH of the precisions in use.
        staging: number of staging slots of each precision in use, for each kind of layers.
    """

    pools: SlotPools

    def __init__(
        self, store: HostStore, plan: SlotPlan, pools: SlotPools, device_table: DeviceTable | None = None,
        writer: Writer = Writer.HOST, *, reuse_high: bool = True,
    ) -> None:  # fmt: skip
        assert (device_table is None) == (writer is Writer.HOST)
        self.store, self.experts, self.slot_plan, self.writer = store, store.experts, plan, writer
        self.device_table, self._views = device_table, dict[tuple[int, int, tuple[int, ...]], PackedExpert]()
        taken = sum(slot.format.nbytes for pool in pools.values() for slot in pool.slots)
        self.budget = Budget(plan.limit, plan.workspace_bytes + taken)
        assert self.budget.reserved <= plan.limit, f"{self.budget.reserved} bytes would exceed {plan.limit}"
        nested = Precision.HIGH in pools and pools[Precision.HIGH].format.nested
        self.parts: Mapping[Precision, tuple[Precision, ...]] = {
            precision: (Precision.LOW, Precision.HIGH) if nested and precision is Precision.HIGH else (precision,)
            for precision in Precision
        }
        table = Table.allocate(len(self.experts.layers), self.experts.num_experts, nested=nested)
        table.reuse_high[:] = reuse_high
        super().__init__(table, pools, pools.bits, self.experts.kinds)
        at = {CODES[precision]: pool.parts() for precision, pool in pools.items()}
        self.quotas = {CODES[precision]: plan.quotas[precision] for precision in pools}
        self.staging = set_pools(table, at, self.quotas, self.kinds)
        if device_table is not None:
            set_pools(device_table.table, at, self.quotas, self.kinds)
            if writer is Writer.DEVICE:
                device_table.fill(pools, pools.bits, plan.quotas)

    def resident(self, layer: int, expert: int, wanted: Precision) -> tuple[Precision, tuple[Slot, ...]]:
        """Return the resident version that serves an expert, and its slots.

        ``wanted`` is the precision in which the expert is wanted.
        """
        table = self.table
        precision = Precision.HIGH if table.precision[layer, expert] == HIGH else Precision.LOW
        if not self.nested:
            return precision, (self.pools[precision].slots[table.slot[0, layer, expert]],)
        base = self.pools[Precision.LOW].slots[table.slot[0, layer, expert]]
        if precision is Precision.LOW or (wanted is Precision.LOW and not table.reuse_high[0]):
            return Precision.LOW, (base,)
        return precision, (base, self.pools[Precision.HIGH].slots[table.slot[1, layer, expert]])

    def lacking(self, layer: int, expert: int, precision: Precision) -> tuple[Precision, ...]:
        """Return the pools from which an expert needs a slot to serve at a precision.

        The result is empty if another separate version is resident.
        """
        if not self.nested:
            return () if self.table.precision[layer, expert] else (precision,)
        return tuple(part for part in self.parts[precision] if self.slot_of(layer, expert, part) is None)

    def far(self, layer: int, wanted: Mapping[int, Precision]) -> list[bool]:
        """Return for each wanted expert whether its bytes have to come from disk.

        They do if the expert has no slot for the wanted version and is not in host memory either.
        """
        far, held = [], self.table.precision[layer]
        for expert, precision in wanted.items():
            lacks = self.lacking(layer, expert, precision) if self.nested else held[expert] != CODES[precision]
            keys = (SliceKey(layer, expert, self.bits[part]) for part in self.parts[precision]) if lacks else ()
            far.append(not all(map(self.store.in_memory, keys)))
        return far

    def lost(self, layer: int, executed: Mapping[int, Precision]) -> str:
        """Return why the CPU could not read some of the experts that it executed.

        Empty if it could.
        """
        parts = ((expert, part) for expert, precision in executed.items() for part in self.parts[precision])
        return self.store.lost(SliceKey(layer, expert, self.bits[part]) for expert, part in parts)

    def in_store(self, layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
        """Return :func:`view_in_store` of an expert, cached."""
        found = self._views.get((layer, expert, bits))
        if found is None:
            found = self._views[layer, expert, bits] = view_in_store(self.store, layer, expert, bits)
        return found

    def forget_views(self) -> None:
        """Drop all views of the store's memory, which is about to be freed."""
        self._views.clear()

    def packed(self, slots: Sequence[Slot]) -> PackedExpert:
        """Return the expert in one slot, or in a base and a residual slot."""
        return slots[0].expert() if len(slots) == 1 else slots[1].expert(slots[0])

    def clear(self) -> None:
        """Evict every expert and forget all uses; no step may be running."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.device_table.table.clear()
            self.device_table.fill(self.pools, self.pools.bits, self.slot_plan.quotas)
            self.read_device()
            return
        for precision in self.pools:
            for layer, expert in self.table.residents(precision):
                self.evict(layer, expert)
        self.table.clear()

    # -- device-side copy of the table ----------------------------------------------------------

    def rows_changed(self, layer: int) -> None:
        """Copy a layer's rows to the device.

        The copy follows current computation, and precedes later launches or replays.
        """
        if self.device_table is None:
            return
        for name in ("precision", "slot"):
            # A copy, because the row may change before it is read.
            rows = torch.from_numpy(getattr(self.table, name)[..., layer, :].copy())
            getattr(self.device_table.table, name)[..., layer, :].copy_(rows, non_blocking=True)

    def read_device(self) -> None:
        """Copy rows that the device has written to the host; waits for the device."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.table.copy_rows(self.device_table.table)


def view_in_store(store: HostStore, layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
    """Return views of an expert in the store's memory.

    ``bits`` are those of the slices that it consists of, the base slice first.
    """
    found: PackedExpert | None = None
    for width in bits:
        key = SliceKey(layer, expert, width)
        found = store.experts.format(key).view(store.packed(key), found)
    assert found is not None
    return found


def check_cache(cache: DeviceCache, in_flight: Iterable[tuple[Precision, Slot, bool]], *, moving: bool = False) -> None:
    """Raise AssertionError if the cache and its table are inconsistent.

    Every slot must be free, in a row, or in flight, and quotas must be kept. Waits for the device.

    Args:
        in_flight: precision, slot, and whether it will be kept, of each fetch.
        moving: check only the sum of the quotas, because a migration moves them between layers.
    """
    flying, decides = list(in_flight), cache.writer is Writer.DEVICE
    if cache.device_table is not None:
        on_device = cache.device_table.table.on_host()
        check_integrity(on_device, ranges=decides, moving=moving)
        cache.read_device()
        for name in ("precision", "slot"):
            ours, theirs = getattr(cache.table, name), getattr(on_device, name)
            assert np.array_equal(ours, theirs[: len(ours)]), "the rows on the device differ from those on the host"
    if decides:
        check_integrity(cache.table, ranges=True, moving=moving)
    else:
        cache.check_integrity(flying, moving=moving)
    assert cache.budget.reserved <= cache.budget.limit
