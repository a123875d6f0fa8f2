"""The expert cache of one rank: device slots, and the table that says which experts are in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_dymoe.cache.budget import SlotPlan
from vllm_dymoe.cache.device_memory import DeviceMemory
from vllm_dymoe.cache.device_table import DeviceTable
from vllm_dymoe.cache.slots import Slot, SlotPool
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert, SliceKey
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import CODES, Table, check_integrity, set_pools


class Writer(StrEnum):
    """Who writes the table's rows."""

    HOST = "host"  # the host, in every step; there is no table on the device
    DEVICE = "device"
    """The device, in every step. Each layer has a range of slots of its own; the staging slots follow after them. The
    host has a copy of the rows, as of the last time it asked."""
    PLANNER = "planner"
    """The host, between steps. The device has a copy of the rows. Every expert is resident, so a device step has no
    misses and only counts uses."""


class Budget(NamedTuple):
    """Device bytes that experts may take (``limit``), and those that they take."""

    limit: int
    reserved: int


class SlotPools(dict[Precision, SlotPool]):
    """The slots of each precision, the high one first."""

    def __init__(self, device: torch.device, device_memory: DeviceMemory) -> None:
        super().__init__()
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # in messages

    def make(self, precision: Precision, fmt: ExpertFormat, count: int, reserved: int) -> None:
        """Allocate the slots of a precision; ConfigError if the memory is not available."""
        nbytes, available = count * fmt.nbytes, self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            self[precision] = SlotPool(fmt, count, self._device, reserved)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error

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

    def check_growth(self, plan: SlotPlan, before: SlotPlan, formats: Mapping[Precision, ExpertFormat]) -> None:
        """ConfigError if a larger plan's slots leave too little memory for computation; old slots still exist."""
        if plan.limit <= before.limit:  # the device has given as much before
            return
        wanted = sum(count * formats[precision].nbytes for precision, count in plan.slots.items())
        held = sum(pool.nbytes for pool in self.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes."
            )


class ExpertCache:
    """Slots and table of one rank's experts. Unless the host is the writer, the device must reach the store."""

    slot_plan: SlotPlan  # how the budget is spent
    budget: Budget  # every byte of it
    table: Table  # which experts are in the slots; the host's table
    nested: bool  # whether low slots hold base slices, and high ones residual slices
    parts: Mapping[Precision, tuple[Precision, ...]]  # pools in which an expert of a precision needs a slot

    def __init__(
        self, store: HostStore, device: torch.device, device_memory: DeviceMemory, writer: Writer = Writer.HOST
    ) -> None:
        self.store, self.experts, self.writer, self.in_store = store, store.experts, writer, views(store)
        self.pools = SlotPools(device, device_memory)
        self.bits: dict[Precision, int] = {}  # of what the slots of each precision hold
        self.device_table: DeviceTable | None = None  # for device-side planning
        if writer is not Writer.HOST:
            assert store.readable
            self.device_table = DeviceTable(store, device)

    def store_moved(self) -> None:
        """Note that the store's bytes move; the device table gets the new addresses with the next ``serve``."""
        self.in_store = views(self.store)
        if self.device_table is not None:
            self.device_table.store_moved()

    def allocate(self, plan: SlotPlan, bits: Mapping[Precision, int], *, reuse_high: bool) -> None:
        """Allocate the slots of a plan; the old ones must be free. ConfigError if the device lacks the memory,
        AssertionError if the slots exceed the budget.

        No expert is resident afterwards, except with device-side planning and a slot for every expert: then all are.
        """
        self.slot_plan, self.bits = plan, {precision: bits[precision] for precision in plan.slots}
        taken = sum(count * self.experts.formats[bits[precision]].nbytes for precision, count in plan.slots.items())
        self.budget = Budget(plan.limit, plan.workspace_bytes + taken)
        assert self.budget.reserved <= plan.limit, f"{self.budget.reserved} bytes would exceed {plan.limit}"
        high = self.experts.formats.get(self.bits.get(Precision.HIGH, 0))
        self.nested = high is not None and high.nested
        self.parts = {
            precision: (Precision.LOW, Precision.HIGH) if self.nested and precision is Precision.HIGH else (precision,)
            for precision in Precision
        }
        for precision, count in plan.slots.items():
            self.pools.make(precision, self.experts.formats[bits[precision]], count, sum(plan.quotas[precision]))
        self.table = Table.allocate(len(self.experts.layers), self.experts.num_experts, nested=self.nested)
        self.table.reuse_high[:] = reuse_high
        pools = self.pools.items()
        sizes = {
            CODES[precision]: (pool.slots[0].packed.data_ptr(), pool.format.nbytes, pool.count)
            for precision, pool in pools
        }
        set_pools(self.table, sizes, {CODES[precision]: plan.quotas[precision] for precision in self.pools})
        if self.device_table is not None:
            self.device_table.set_slots(self.pools, plan.quotas)
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.device_table.fill(self.pools, plan.quotas)

    def resident(self, layer: int, expert: int, wanted: Precision) -> tuple[Precision, tuple[Slot, ...]]:
        """Return the resident version of an expert that serves a wanted precision, and its slots."""
        table = self.table
        precision = Precision.HIGH if table.precision[layer, expert] == HIGH else Precision.LOW
        if not self.nested:
            return precision, (self.pools[precision].slots[table.slot[0, layer, expert]],)
        base = self.pools[Precision.LOW].slots[table.slot[0, layer, expert]]
        if precision is Precision.LOW or (wanted is Precision.LOW and not table.reuse_high[0]):
            return Precision.LOW, (base,)
        return precision, (base, self.pools[Precision.HIGH].slots[table.slot[1, layer, expert]])

    def lacking(self, layer: int, expert: int, precision: Precision) -> tuple[Precision, ...]:
        """Return the pools in which an expert still needs a slot to serve a precision; none if another version is
        resident."""
        if not self.nested:
            return () if self.table.precision[layer, expert] else (precision,)
        return tuple(part for part in self.parts[precision] if self.slot_of(layer, expert, part) is None)

    def far(self, layer: int, wanted: Mapping[int, Precision]) -> list[bool]:
        """Return for each wanted expert whether it is neither in a slot at that precision nor in host memory."""
        far, held = [], self.table.precision[layer]
        for expert, precision in wanted.items():
            lacks = self.lacking(layer, expert, precision) if self.nested else held[expert] != CODES[precision]
            keys = (SliceKey(layer, expert, self.bits[part]) for part in self.parts[precision]) if lacks else ()
            far.append(not all(map(self.store.in_memory, keys)))
        return far

    def lost(self, layer: int, wanted: Mapping[int, Precision], on_cpu: Iterable[int]) -> str:
        """Return why bytes of experts that the CPU executed could not be read; empty if all could."""
        parts = ((expert, part) for expert in on_cpu for part in self.parts[wanted[expert]])
        return self.store.lost(SliceKey(layer, expert, self.bits[part]) for expert, part in parts)

    def slot_of(self, layer: int, expert: int, part: Precision) -> Slot | None:
        """Return an expert's slot in a pool, or None; for nested versions only."""
        index = self.table.slot[int(part is Precision.HIGH), layer, expert]
        return self.pools[part].slots[index] if index >= 0 else None

    def packed(self, slots: Sequence[Slot]) -> PackedExpert:
        """Return the packed expert in one slot, or in the slots of a base and a residual slice."""
        base = slots[0].expert
        assert base is not None
        if len(slots) == 1:
            return base
        residual = slots[1]
        if residual.joined is None or residual.joined[0] is not slots[0]:
            residual.joined = slots[0], self.pools[Precision.HIGH].format.view(residual.packed, base)
        return residual.joined[1]

    def evict(self, layer: int, expert: int, part: Precision | None = None) -> bool:
        """Free an expert's slots, or with the high pool of nested versions its residual slice alone.

        The next copy waits for a slot's last reader. Returns False if the expert had no slot.
        """
        freed = self.table.remove(layer, expert, residual=self.nested and part is Precision.HIGH)
        for precision, index in freed:
            self.pools[precision].give_back(self.pools[precision].slots[index], kept=True)
        return bool(freed)

    def clear(self) -> None:
        """Evict all experts and forget all scores; no step may be running."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.device_table.table.clear()
            self.device_table.fill(self.pools, self.slot_plan.quotas)
            self.read_device()
            return
        for precision in self.pools:
            for layer, expert in self.table.residents(precision):
                self.evict(layer, expert)
        self.table.clear()

    # -- the device's table ---------------------------------------------------------------------

    def rows_changed(self, layer: int) -> None:
        """Enqueue a copy of a layer's rows to the device, after all launches so far and before the next ones."""
        if self.device_table is None:
            return
        for name in ("precision", "slot"):
            rows = torch.from_numpy(getattr(self.table, name)[..., layer, :].copy())  # which may change before
            getattr(self.device_table.table, name)[..., layer, :].copy_(rows, non_blocking=True)

    def read_device(self) -> None:
        """Copy the rows from the device, if it writes them; waits for it."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.table.copy_rows(self.device_table.table)


def views(store: HostStore) -> Callable[[int, int, tuple[int, ...]], PackedExpert]:
    """Return a cached function from (layer, expert, bits of its slices) to the expert in the store's memory."""

    @cache
    def view(layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
        found: PackedExpert | None = None
        for width in bits:
            found = store.experts.formats[width].view(store.packed(SliceKey(layer, expert, width)), found)
        assert found is not None
        return found

    return view


def check_cache(cache: ExpertCache, in_flight: Iterable[tuple[Precision, Slot, bool]], *, moving: bool = False) -> None:
    """AssertionError unless every slot is free, in a row or in flight, and the budget and quotas are kept.

    ``moving``: only the sum of the quotas has to be kept. Waits for the device.
    """
    flying, decides = list(in_flight), cache.writer is Writer.DEVICE
    if cache.device_table is not None:
        on_device = cache.device_table.table.on_host()
        check_integrity(on_device, ranges=decides, moving=moving)
        cache.read_device()
        for name in ("precision", "slot"):
            ours, theirs = getattr(cache.table, name), getattr(on_device, name)
            assert np.array_equal(ours, theirs[: len(ours)]), "the device reads other rows than the host"
    check_integrity(cache.table, ranges=decides, moving=moving)
    for precision, pool in cache.pools.items():
        filling = [(slot.index, kept) for other, slot, kept in flying if other is precision]
        if decides:
            continue
        named = cache.table.slots(precision)
        pool.check_integrity(named + [index for index, _ in filling])
        reserved = sum(cache.slot_plan.quotas[precision]) - len(named) - sum(kept for _, kept in filling)
        assert pool.reserved == reserved, f"{pool.reserved} slots are promised, expected {reserved}"
    assert cache.budget.reserved <= cache.budget.limit
