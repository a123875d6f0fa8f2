"""What a budget has become: the plan, the slots, and the table that says who is in them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.budget import BudgetTracker
from vllm_dymoe.residency.format import Expert, Format, ModelExperts
from vllm_dymoe.residency.rule import HIGH
from vllm_dymoe.residency.slots import Slot, SlotPool
from vllm_dymoe.residency.table import ResidencyTable
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.device_memory import DeviceMemory
from vllm_dymoe.runtime.sizing import SlotPlan


class ExpertMemory:
    """The device memory of one rank's experts.

    Args:
        experts: of the rank.
        device: where slots are.
        device_memory: says what the device has left.

    Attributes:
        plan: how the budget is spent.
        budget: counts every byte of it.
        pools: slots by tier, the high one first.
        table: who is in them.
        bits: of what the slots of each tier hold.
        nested: whether slots of the low tier hold bases, and those of the high one fine slices.
        parts: pools that an expert of a tier needs a slot of.
    """

    plan: SlotPlan
    budget: BudgetTracker
    table: ResidencyTable
    nested: bool
    parts: Mapping[Tier, tuple[Tier, ...]]
    make_table = ResidencyTable

    def __init__(self, experts: ModelExperts, device: torch.device, device_memory: DeviceMemory) -> None:
        self.experts, self._device, self._device_memory = experts, device, device_memory
        self.pools: dict[Tier, SlotPool] = {}
        self.bits: dict[Tier, int] = {}

    def allocate(self, plan: SlotPlan, bits: Mapping[Tier, int], *, reuse_high: bool) -> None:
        """Make the slots of a plan; those of the plan before have been freed.

        Raises:
            ConfigError: the device has no memory for them.
        """
        self.plan, self.bits = plan, {tier: bits[tier] for tier in plan.slots}
        self.budget = BudgetTracker(plan.limit)
        if plan.workspace_bytes:
            self.budget.reserve("the kernel's workspace and the predictor", plan.workspace_bytes)
        high = self.experts.formats.get(self.bits.get(Tier.HI, 0))
        self.nested = high is not None and high.nested
        self.parts = {tier: (Tier.LO, Tier.HI) if self.nested and tier is Tier.HI else (tier,) for tier in Tier}
        self.table = self.make_table(self.experts.num_experts, plan.quotas, reuse_high=reuse_high, nested=self.nested)
        for tier, count in plan.slots.items():
            fmt = self.experts.formats[bits[tier]]
            self.budget.reserve(f"{count} slots of tier {tier.value}", count * fmt.nbytes)
            self.pools[tier] = self.make_pool(fmt, count, sum(plan.quotas[tier]))

    def make_pool(self, fmt: Format, count: int, promised: int) -> SlotPool:
        """Slots whose memory is there from now on, whatever other processes take later.

        Raises:
            ConfigError: another process has taken it already.
        """
        nbytes = count * fmt.nbytes
        available = self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            return SlotPool(fmt, count, self._device, promised)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error

    def fence(self, filled: Any) -> None:
        """Let the first copy into each slot wait for a fence; see :meth:`SlotPool.fence`."""
        for pool in self.pools.values():
            pool.fence(filled)

    def free(self) -> None:
        """Give the slots' memory back, to this process and to others; nobody may use one."""
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
        self._device_memory.available()

    def check_growth(self, plan: SlotPlan, bits: Mapping[Tier, int]) -> None:
        """Refuse more slots than the device has memory for, while the old ones are still there.

        Raises:
            ConfigError: there is not enough beside what computation takes.
        """
        if plan.limit <= self.plan.limit:  # the device has given as much before
            return
        wanted = sum(count * self.experts.formats[bits[tier]].nbytes for tier, count in plan.slots.items())
        held = sum(pool.nbytes for pool in self.pools.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes."
            )

    def resident(self, layer: int, expert: int, wanted: Tier) -> tuple[Tier, tuple[Slot, ...]]:
        """The version of an expert that serves where a tier is wanted, of what is there, and its slots."""
        tier = Tier.HI if self.table.tier[layer, expert] == HIGH else Tier.LO
        if not self.nested:
            return tier, (self.pools[tier].slots[self.table.slot[layer, expert]],)
        base = self.pools[Tier.LO].slots[self.table.slot[layer, expert]]
        if tier is Tier.LO or (wanted is Tier.LO and not self.table.reuse_high):
            return Tier.LO, (base,)
        return tier, (base, self.pools[Tier.HI].slots[self.table.fine[layer, expert]])

    def lacking(self, layer: int, expert: int, tier: Tier) -> tuple[Tier, ...]:
        """Pools that an expert needs a slot of before it can serve at a tier; none where another version is there."""
        if not self.nested:
            return () if self.table.holds(layer, expert) else (tier,)
        return tuple(part for part in self.parts[tier] if self.slot_of(layer, expert, part) is None)

    def slot_of(self, layer: int, expert: int, part: Tier) -> Slot | None:
        """The slot in a tier's pool that an expert's row names, if it does, where the versions are nested."""
        index = (self.table.fine if part is Tier.HI else self.table.slot)[layer, expert]
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

        Args:
            layer: of the expert.
            expert: its number.
            part: the pool that needs a slot. Where it is that of fine slices the expert keeps its base.
        """
        demoted = self.nested and part is Tier.HI
        freed = (self.table.remove_fine if demoted else self.table.remove)(layer, expert)
        for tier, index in freed:
            pool = self.pools[tier]
            pool.give_back(pool.slots[index], kept=True)
        return bool(freed)

    def rows_changed(self, layer: int) -> None:
        """Tell who else reads a layer's rows that they are others; nobody does."""

    def clear(self) -> None:
        """Keep nobody, and forget who was used; no step may be running."""
        for tier in self.pools:
            for layer, expert in self.table.residents(tier):
                self.evict(layer, expert)
        self.table.forget()

    def check_integrity(self, in_flight: Iterable[tuple[Tier, Slot, bool]]) -> None:
        """Every slot is free, named by one row, or somebody's who waits for its bytes; the budget is kept.

        Args:
            in_flight: tier and slot of everything that is neither free nor in the table, and whether it is to be kept.

        Raises:
            AssertionError: it is not so.
        """
        self.table.check_integrity()
        there = list(in_flight)
        for tier, pool in self.pools.items():
            named, filling = self.table.slots(tier), [slot.index for other, slot, _ in there if other is tier]
            pool.check_integrity(named + filling)
            promised = sum(self.plan.quotas[tier]) - len(named) - sum(k for other, _, k in there if other is tier)
            assert pool.promised == promised, f"{pool.promised} slots are promised, expected {promised}"
        assert self.budget.peak <= self.budget.limit

    @property
    def _where(self) -> str:
        """Whose memory the slots are in, for people."""
        return "host" if self._device.type == "cpu" else "device"
