"""What a budget has become: the plan, the slots, and the table that says which experts are in them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.format import BlobKey, Expert, Format
from vllm_dymoe.residency.rule import HIGH
from vllm_dymoe.residency.slots import Slot, SlotPool
from vllm_dymoe.residency.table import CODES, Table, check_integrity, set_pools
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.device_memory import DeviceMemory
from vllm_dymoe.runtime.device_side import DeviceSide
from vllm_dymoe.runtime.sizing import SlotPlan
from vllm_dymoe.store import HostStore


class Writer(StrEnum):
    """What writes the table's rows."""

    HOST = "host"  # the host, in every step; there are no others
    DEVICE = "device"
    """The device, in every step. Each layer has slots of its own, behind which lie those that no layer keeps. The host
    has a copy of the rows as far as it has asked for them."""
    PLANNER = "planner"
    """The host, between steps. The device has a copy of the rows, where it runs steps. Every expert is there, so that a
    step of the device decides nothing and only counts."""


class Budget(NamedTuple):
    """Device bytes that experts may take, and those that they take."""

    limit: int
    reserved: int


class SlotPools(dict[Tier, SlotPool]):
    """Slots by tier, the high one first."""

    def __init__(self, device: torch.device, device_memory: DeviceMemory) -> None:
        super().__init__()
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # in messages

    def make(self, tier: Tier, fmt: Format, count: int, promised: int) -> None:
        """Add slots whose memory is there from now on; ConfigError if something else has taken it already."""
        nbytes, available = count * fmt.nbytes, self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            self[tier] = SlotPool(fmt, count, self._device, promised)
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

    def check_growth(self, plan: SlotPlan, before: SlotPlan, formats: Mapping[Tier, Format]) -> None:
        """ConfigError for more slots than fit beside what computation takes; the old ones are still there."""
        if plan.limit <= before.limit:  # the device has given as much before
            return
        wanted = sum(count * formats[tier].nbytes for tier, count in plan.slots.items())
        held = sum(pool.nbytes for pool in self.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes."
            )


class ExpertMemory:
    """The device memory of one rank's experts; the device can read the store, unless the host is the writer."""

    plan: SlotPlan  # how the budget is spent
    budget: Budget  # every byte of it
    table: Table  # which experts are in them, on the host
    nested: bool  # whether slots of the low tier hold bases, and those of the high one fine slices
    parts: Mapping[Tier, tuple[Tier, ...]]  # pools that an expert of a tier needs a slot of

    def __init__(
        self, store: HostStore, device: torch.device, device_memory: DeviceMemory, writer: Writer = Writer.HOST
    ) -> None:
        self.store, self.experts, self.writer, self.in_store = store, store.experts, writer, views(store)
        self.pools = SlotPools(device, device_memory)
        self.bits: dict[Tier, int] = {}  # of what the slots of each tier hold
        self.device_side: DeviceSide | None = None  # what steps without the host go by
        if writer is not Writer.HOST:
            assert store.readable
            self.device_side = DeviceSide(store, device)

    def store_moved(self) -> None:
        """The store's bytes will lie elsewhere; what the device goes by follows with the next ``serve``."""
        self.in_store = views(self.store)
        if self.device_side is not None:
            self.device_side.store_moved()

    def allocate(self, plan: SlotPlan, bits: Mapping[Tier, int], *, reuse_high: bool) -> None:
        """Make the slots of a plan, when those of the plan before have been freed; ConfigError if the device has no
        memory, AssertionError if the budget does not hold them. No expert is there then, except where the device
        decides and all of them have a slot."""
        self.plan, self.bits = plan, {tier: bits[tier] for tier in plan.slots}
        taken = sum(count * self.experts.formats[bits[tier]].nbytes for tier, count in plan.slots.items())
        self.budget = Budget(plan.limit, plan.workspace_bytes + taken)
        assert self.budget.reserved <= plan.limit, f"{self.budget.reserved} bytes would exceed {plan.limit}"
        high = self.experts.formats.get(self.bits.get(Tier.HI, 0))
        self.nested = high is not None and high.nested
        self.parts = {tier: (Tier.LO, Tier.HI) if self.nested and tier is Tier.HI else (tier,) for tier in Tier}
        for tier, count in plan.slots.items():
            self.pools.make(tier, self.experts.formats[bits[tier]], count, sum(plan.quotas[tier]))
        self.table = Table.allocate(len(self.experts.layers), self.experts.num_experts, nested=self.nested)
        self.table.reuse_high[:] = reuse_high
        sizes = {CODES[tier]: (0, pool.format.nbytes, pool.count) for tier, pool in self.pools.items()}
        set_pools(self.table, sizes, {CODES[tier]: plan.quotas[tier] for tier in self.pools})
        if self.device_side is not None:
            self.device_side.set_slots(self.pools, plan.quotas)
        if self.device_side is not None and self.writer is Writer.DEVICE:
            self.device_side.fill(self.pools, plan.quotas)

    def resident(self, layer: int, expert: int, wanted: Tier) -> tuple[Tier, tuple[Slot, ...]]:
        """The version of an expert that serves where a tier is wanted, of what is there, and its slots."""
        table = self.table
        tier = Tier.HI if table.tier[layer, expert] == HIGH else Tier.LO
        if not self.nested:
            return tier, (self.pools[tier].slots[table.slot[0, layer, expert]],)
        base = self.pools[Tier.LO].slots[table.slot[0, layer, expert]]
        if tier is Tier.LO or (wanted is Tier.LO and not table.reuse_high[0]):
            return Tier.LO, (base,)
        return tier, (base, self.pools[Tier.HI].slots[table.slot[1, layer, expert]])

    def lacking(self, layer: int, expert: int, tier: Tier) -> tuple[Tier, ...]:
        """Pools that an expert needs a slot of before it can serve at a tier; none where another version is there."""
        if not self.nested:
            return () if self.table.tier[layer, expert] else (tier,)
        return tuple(part for part in self.parts[tier] if self.slot_of(layer, expert, part) is None)

    def far(self, layer: int, wanted: Mapping[int, Tier]) -> list[bool]:
        """Which of the wanted experts have no slot for what is wanted, and are not in host memory either."""
        far, held = [], self.table.tier[layer]
        for expert, tier in wanted.items():
            lacks = self.lacking(layer, expert, tier) if self.nested else held[expert] != CODES[tier]
            keys = (BlobKey(layer, expert, self.bits[part]) for part in self.parts[tier]) if lacks else ()
            far.append(not all(map(self.store.in_memory, keys)))
        return far

    def lost(self, layer: int, wanted: Mapping[int, Tier], there: Iterable[int]) -> str:
        """Why some of the wanted experts were not computed where they lie; empty if all were."""
        parts = ((expert, part) for expert in there for part in self.parts[wanted[expert]])
        return self.store.lost(BlobKey(layer, expert, self.bits[part]) for expert, part in parts)

    def slot_of(self, layer: int, expert: int, part: Tier) -> Slot | None:
        """The slot in a tier's pool that an expert's row names, if it does, where the versions are nested."""
        index = self.table.slot[int(part is Tier.HI), layer, expert]
        return self.pools[part].slots[index] if index >= 0 else None

    def packed(self, slots: Sequence[Slot]) -> Expert:
        """What lies in the slots of an expert: in one, or in a base and a fine slice."""
        base = slots[0].expert
        assert base is not None
        if len(slots) == 1:
            return base
        fine = slots[1]
        if fine.joined is None or fine.joined[0] is not slots[0]:
            fine.joined = slots[0], self.pools[Tier.HI].format.view(fine.blob, base)
        return fine.joined[1]

    def evict(self, layer: int, expert: int, part: Tier | None = None) -> bool:
        """Free an expert's slots, which the next copy may write once their last reader has ended; False if it has none.
        For the pool of fine slices it keeps its base."""
        freed = self.table.remove(layer, expert, fine=self.nested and part is Tier.HI)
        for tier, index in freed:
            self.pools[tier].give_back(self.pools[tier].slots[index], kept=True)
        return bool(freed)

    def clear(self) -> None:
        """Keep no expert, and forget which ones were used; no step may be running."""
        if self.device_side is not None and self.writer is Writer.DEVICE:
            self.device_side.table.clear()
            self.device_side.fill(self.pools, self.plan.quotas)
            self.read_device()
            return
        for tier in self.pools:
            for layer, expert in self.table.residents(tier):
                self.evict(layer, expert)
        self.table.clear()

    # -- what the device has --------------------------------------------------------------------

    def rows_changed(self, layer: int) -> None:
        """Copy a layer's rows to the device, behind all that computes and before what is launched or replayed next."""
        if self.device_side is None:
            return
        for name in ("tier", "slot"):
            rows = torch.from_numpy(getattr(self.table, name)[..., layer, :].copy())  # which may change before
            getattr(self.device_side.table, name)[..., layer, :].copy_(rows, non_blocking=True)

    def read_device(self) -> None:
        """Where the device writes, learn what it has written; waits for it."""
        if self.device_side is not None and self.writer is Writer.DEVICE:
            self.table.copy_rows(self.device_side.table)


def views(store: HostStore) -> Callable[[int, int, tuple[int, ...]], Expert]:
    """Experts of a store in memory where they lie, by layer, number, and bits of the slices that they are made of."""

    @cache
    def view(layer: int, expert: int, bits: tuple[int, ...]) -> Expert:
        found: Expert | None = None
        for width in bits:
            found = store.experts.formats[width].view(store.blob(BlobKey(layer, expert, width)), found)
        assert found is not None
        return found

    return view


def check_memory(memory: ExpertMemory, in_flight: Iterable[tuple[Tier, Slot, bool]], *, moving: bool = False) -> None:
    """AssertionError unless every slot is free, in a row, or in flight, and the budget is kept, by each layer unless
    shares are moving; waits for the device."""
    there, decides = list(in_flight), memory.writer is Writer.DEVICE
    if memory.device_side is not None:
        on_device = memory.device_side.table.on_host()
        check_integrity(on_device, ranges=decides, moving=moving)
        memory.read_device()
        for name in ("tier", "slot"):
            ours, theirs = getattr(memory.table, name), getattr(on_device, name)
            assert np.array_equal(ours, theirs[: len(ours)]), "the device reads other rows than the host"
    check_integrity(memory.table, ranges=decides, moving=moving)
    for tier, pool in memory.pools.items():
        filling = [(slot.index, kept) for other, slot, kept in there if other is tier]
        if decides:
            continue
        named = memory.table.slots(tier)
        pool.check_integrity(named + [index for index, _ in filling])
        promised = sum(memory.plan.quotas[tier]) - len(named) - sum(kept for _, kept in filling)
        assert pool.promised == promised, f"{pool.promised} slots are promised, expected {promised}"
    assert memory.budget.reserved <= memory.budget.limit
