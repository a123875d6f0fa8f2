"""The cache of a device: what a budget has become, and who writes the table."""

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
    """The slots of one plan by precision, the high one first; ConfigError if their memory cannot be had.

    Attributes:
        bits: of what the slots of each precision hold, as the experts' formats are named.
    """

    def __init__(
        self, plan: SlotPlan, experts: ModelExperts, bits: Mapping[Precision, int], device: torch.device,
        device_memory: DeviceMemory,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bits = {precision: bits[precision] for precision in plan.slots}
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # in messages
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
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory.",
                option="expert_budget",
            )
        try:
            arena = Arena(nbytes, device=None if self._device.type == "cpu" else self._device)
            arena.memory.fill_(0)  # so that it is there: a machine short of it would end the process later
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory.",
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
        """ConfigError for slots of so many bytes, if they do not fit beside what computation takes; the old ones are
        still there."""
        if plan.limit <= before.limit:  # the device has given as much before
            return
        wanted = nbytes
        held = sum(pool.nbytes for pool in self.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes.",
                option="expert_budget",
            )


class DeviceCache(ExpertCache):
    """The device memory of one rank's experts, for one plan of slots; another plan is another cache.

    No expert is resident at first, except with device-side planning if all of them have a slot. AssertionError if the
    plan exceeds its budget.

    Args:
        plan: how the budget is spent.
        pools: the plan's slots.
        device_table: what steps without the host go by, whose rows are emptied; None if the host is the writer.
        reuse_high: a high version serves where a low one is wanted.

    Attributes:
        budget: every byte of it.
        parts: pools that an expert of a precision needs a slot of.
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

    def lost(self, layer: int, executed: Mapping[int, Precision]) -> str:
        """Return why the CPU could not read some of the experts that it has executed; empty if it could."""
        parts = ((expert, part) for expert, precision in executed.items() for part in self.parts[precision])
        return self.store.lost(SliceKey(layer, expert, self.bits[part]) for expert, part in parts)

    def in_store(self, layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
        """Return :func:`view_in_store` of an expert, made once."""
        found = self._views.get((layer, expert, bits))
        if found is None:
            found = self._views[layer, expert, bits] = view_in_store(self.store, layer, expert, bits)
        return found

    def forget_views(self) -> None:
        """Hold no memory of the store any more, which is about to give it back."""
        self._views.clear()

    def packed(self, slots: Sequence[Slot]) -> PackedExpert:
        """What lies in the slots of an expert: in one, or in a base and a residual slice."""
        return slots[0].expert() if len(slots) == 1 else slots[1].expert(slots[0])

    def clear(self) -> None:
        """Keep no expert, and forget which ones were used; no step may be running."""
        if self.device_table is not None and self.writer is Writer.DEVICE:
            self.device_table.table.clear()
            self.device_table.fill(self.pools, self.pools.bits, self.slot_plan.quotas)
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


def view_in_store(store: HostStore, layer: int, expert: int, bits: tuple[int, ...]) -> PackedExpert:
    """Return views of an expert where the store has it in memory, by the bits of the slices that it is made of."""
    found: PackedExpert | None = None
    for width in bits:
        key = SliceKey(layer, expert, width)
        found = store.experts.format(key).view(store.packed(key), found)
    assert found is not None
    return found


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
