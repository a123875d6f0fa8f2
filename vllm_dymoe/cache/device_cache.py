"""The cache of a device: what a budget has become, and who writes the table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_dymoe.cache.budget import SlotPlan
from vllm_dymoe.cache.device_memory import DeviceMemory
from vllm_dymoe.cache.device_table import DeviceTable
from vllm_dymoe.cache.expert_cache import ExpertCache
from vllm_dymoe.cache.slots import Arena, Slot, SlotPool
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert, SliceKey
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import CODES, Table, check_integrity, set_pools


class Writer(StrEnum):
    """What writes the table's rows."""

    HOST = "host"  # the host, in every step; there are no others
    DEVICE = "device"
    """The device, in every step. Each layer has slots of its own, behind which lie those that no layer keeps. The host
    has a copy of the rows as far as it has asked for them."""
    PLANNER = "planner"
    """The host, between steps. The device has a copy of the rows, where it runs steps. Every expert is there, so that a
    step of the device plans nothing and only counts."""


class Budget(NamedTuple):
    """Device bytes that experts may take, and those that they take."""

    limit: int
    reserved: int


class SlotPools(dict[Precision, SlotPool]):
    """Slots by precision, the high one first."""

    def __init__(self, device: torch.device, device_memory: DeviceMemory) -> None:
        super().__init__()
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # in messages

    def make(self, precision: Precision, fmt: ExpertFormat, count: int, reserved: int) -> None:
        """Add slots whose memory is there from now on; ConfigError if something else has taken it already."""
        nbytes, available = count * fmt.nbytes, self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            arena = Arena(nbytes, device=None if self._device.type == "cpu" else self._device)
            arena.memory.fill_(0)  # so that it is there: a machine short of it would end the process later
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error
        self[precision] = SlotPool(fmt, [arena], reserved)

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
        """ConfigError for more slots than fit beside what computation takes; the old ones are still there."""
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


class DeviceCache(ExpertCache):
    """The device memory of one rank's experts; the device can read the store, unless the host is the writer. There are
    no slots before ``allocate``."""

    pools: SlotPools
    slot_plan: SlotPlan  # how the budget is spent
    budget: Budget  # every byte of it
    parts: Mapping[Precision, tuple[Precision, ...]]  # pools that an expert of a precision needs a slot of

    def __init__(
        self, store: HostStore, device: torch.device, device_memory: DeviceMemory, writer: Writer = Writer.HOST
    ) -> None:
        self.store, self.experts, self.writer, self.in_store = store, store.experts, writer, views(store)
        table = Table.allocate(len(store.experts.layers), store.experts.num_experts)
        super().__init__(table, SlotPools(device, device_memory), {})
        self.device_table: DeviceTable | None = None  # what steps without the host go by
        if writer is not Writer.HOST:
            assert store.readable
            self.device_table = DeviceTable(store, device)

    def store_moved(self) -> None:
        """The store's bytes will lie elsewhere; what the device goes by follows with the next ``serve``."""
        self.in_store = views(self.store)
        if self.device_table is not None:
            self.device_table.store_moved()

    def allocate(self, plan: SlotPlan, bits: Mapping[Precision, int], *, reuse_high: bool) -> None:
        """Make the slots of a plan, when those of the plan before have been freed; ConfigError if the device has no
        memory, AssertionError if the budget does not hold them. No expert is there then, except where the device
        decides and all of them have a slot."""
        self.slot_plan, self.bits = plan, {precision: bits[precision] for precision in plan.slots}
        taken = sum(count * self.experts.formats[bits[precision]].nbytes for precision, count in plan.slots.items())
        self.budget = Budget(plan.limit, plan.workspace_bytes + taken)
        assert self.budget.reserved <= plan.limit, f"{self.budget.reserved} bytes would exceed {plan.limit}"
        high = self.experts.formats.get(self.bits.get(Precision.HIGH, 0))
        nested = high is not None and high.nested
        self.parts = {
            precision: (Precision.LOW, Precision.HIGH) if nested and precision is Precision.HIGH else (precision,)
            for precision in Precision
        }
        for precision, count in plan.slots.items():
            self.pools.make(precision, self.experts.formats[bits[precision]], count, sum(plan.quotas[precision]))
        self.table = Table.allocate(len(self.experts.layers), self.experts.num_experts, nested=nested)
        self.table.reuse_high[:] = reuse_high
        pools = {CODES[precision]: pool for precision, pool in self.pools.items()}
        at = {code: (pool.slots[0].packed.data_ptr(), pool.format.nbytes, pool.count) for code, pool in pools.items()}
        quotas = {CODES[precision]: plan.quotas[precision] for precision in self.pools}
        set_pools(self.table, at, quotas)
        if self.device_table is not None:
            self.device_table.set_slots(at, quotas)
            if self.writer is Writer.DEVICE:
                self.device_table.fill(self.pools, plan.quotas)

    def resident(self, layer: int, expert: int, wanted: Precision) -> tuple[Precision, tuple[Slot, ...]]:
        """The version of an expert that serves where a precision is wanted, of what is there, and its slots."""
        table = self.table
        precision = Precision.HIGH if table.precision[layer, expert] == HIGH else Precision.LOW
        if not self.nested:
            return precision, (self.pools[precision].slots[table.slot[0, layer, expert]],)
        base = self.pools[Precision.LOW].slots[table.slot[0, layer, expert]]
        if precision is Precision.LOW or (wanted is Precision.LOW and not table.reuse_high[0]):
            return Precision.LOW, (base,)
        return precision, (base, self.pools[Precision.HIGH].slots[table.slot[1, layer, expert]])

    def lacking(self, layer: int, expert: int, precision: Precision) -> tuple[Precision, ...]:
        """Pools that an expert needs a slot of before it can serve at a precision; none where another version is
        there."""
        if not self.nested:
            return () if self.table.precision[layer, expert] else (precision,)
        return tuple(part for part in self.parts[precision] if self.slot_of(layer, expert, part) is None)

    def far(self, layer: int, wanted: Mapping[int, Precision]) -> list[bool]:
        """Which of the wanted experts have no slot for what is wanted, and are not in host memory either."""
        far, held = [], self.table.precision[layer]
        for expert, precision in wanted.items():
            lacks = self.lacking(layer, expert, precision) if self.nested else held[expert] != CODES[precision]
            keys = (SliceKey(layer, expert, self.bits[part]) for part in self.parts[precision]) if lacks else ()
            far.append(not all(map(self.store.in_memory, keys)))
        return far

    def lost(self, layer: int, wanted: Mapping[int, Precision], on_cpu: Iterable[int]) -> str:
        """Why some of the wanted experts were not computed by the CPU; empty if all were."""
        parts = ((expert, part) for expert in on_cpu for part in self.parts[wanted[expert]])
        return self.store.lost(SliceKey(layer, expert, self.bits[part]) for expert, part in parts)

    def packed(self, slots: Sequence[Slot]) -> PackedExpert:
        """What lies in the slots of an expert: in one, or in a base and a residual slice."""
        return slots[0].expert() if len(slots) == 1 else slots[1].expert(slots[0])

    def clear(self) -> None:
        """Keep no expert, and forget which ones were used; no step may be running."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.device_table.table.clear()
            self.device_table.fill(self.pools, self.slot_plan.quotas)
            self.read_device()
            return
        for precision in self.pools:
            for layer, expert in self.table.residents(precision):
                self.evict(layer, expert)
        self.table.clear()

    # -- what the device has --------------------------------------------------------------------

    def rows_changed(self, layer: int) -> None:
        """Copy a layer's rows to the device, behind all that computes and before what is launched or replayed next."""
        if self.device_table is None:
            return
        for name in ("precision", "slot"):
            rows = torch.from_numpy(getattr(self.table, name)[..., layer, :].copy())  # which may change before
            getattr(self.device_table.table, name)[..., layer, :].copy_(rows, non_blocking=True)

    def read_device(self) -> None:
        """Where the device writes, learn what it has written; waits for it."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.table.copy_rows(self.device_table.table)


def views(store: HostStore) -> Callable[[int, int, tuple[int, ...]], PackedExpert]:
    """Experts of a store in memory where they lie, by layer, number, and bits of the slices that they are made of."""

    @cache
    def view(layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
        found: PackedExpert | None = None
        for width in bits:
            found = store.experts.formats[width].view(store.packed(SliceKey(layer, expert, width)), found)
        assert found is not None
        return found

    return view


def check_cache(cache: DeviceCache, in_flight: Iterable[tuple[Precision, Slot, bool]], *, moving: bool = False) -> None:
    """AssertionError unless every slot is free, in a row, or in flight, and the budget is kept, by each layer unless
    shares are moving; waits for the device."""
    flying, decides = list(in_flight), cache.writer is Writer.DEVICE
    if cache.device_table is not None:
        on_device = cache.device_table.table.on_host()
        check_integrity(on_device, ranges=decides, moving=moving)
        cache.read_device()
        for name in ("precision", "slot"):
            ours, theirs = getattr(cache.table, name), getattr(on_device, name)
            assert np.array_equal(ours, theirs[: len(ours)]), "the device reads other rows than the host"
    if decides:
        check_integrity(cache.table, ranges=True, moving=moving)
    else:
        cache.check_integrity(flying, moving=moving)
    assert cache.budget.reserved <= cache.budget.limit
