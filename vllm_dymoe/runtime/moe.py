"""The forward of one MoE layer: plan, acquire, compute, combine.

Experts that are on the device compute first while the others are on their way;
each of these computes when it arrives, and its slot takes the next one. Where the
"device" is host memory and a transfer is a copy by the cores that compute, the two
take turns instead: threads that compete for a core cost both far more. Every
result goes to its own row, and the rows are added in the router's order at the
end. So neither the cache nor the timing of a transfer can change a bit of the
output (invariant 1), and a few slots serve any number of experts.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.experts.budget import BudgetTracker
from vllm_dymoe.experts.cache import CacheStats, ExpertCache
from vllm_dymoe.experts.handles import Version
from vllm_dymoe.experts.layout import ExpertFormat
from vllm_dymoe.experts.memory import available_host_memory
from vllm_dymoe.experts.slots import SlotPool
from vllm_dymoe.experts.store import BlobKey, HostStore
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.kernels import Activation, ExpertKernel, ExpertWork, combine, make_kernel
from vllm_dymoe.policy import Policy, make_policy
from vllm_dymoe.policy.base import Routing
from vllm_dymoe.runtime.grouping import Group, group_by_expert
from vllm_dymoe.runtime.sizing import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    tier_bits,
    workspace_bytes,
)
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.transfer import Reason, TransferEngine, TransferError, TransferStats, make_engine


class MoERuntime:
    """Every MoE layer of one model on one rank.

    Args:
        store: the experts' packed bytes.
        options: validated options.
        device: where slots are and computation happens.
        automatic_budget: bytes to use if ``options.expert_budget`` is automatic.
        policy: in place of the one that the options name.
        engine: in place of the one that fits the device.

    Raises:
        ConfigError: the budget cannot hold one expert of each tier that the policy uses.
    """

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,
        policy: Policy | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        self.store = store
        self.experts = store.experts
        self.options = options
        self.device = device
        self.policy = policy or make_policy(options.policy, options.policy_options)
        self.kernel: ExpertKernel = make_kernel(
            device, workspace_bytes(self.experts, device.type), self.experts.formats
        )
        largest = max(fmt.nbytes for fmt in self.experts.formats.values())
        self.engine = engine or make_engine(
            store, device, options.io_threads, largest, options.transfer_timeout_s or None
        )
        self._late: list[Version] = []
        self._bits = {tier: tier_bits(options, tier) for tier in Tier}
        self._automatic_budget = automatic_budget
        self._cache_stats = CacheStats()
        limit = limit_in_bytes(
            options.expert_budget, self.experts, options, self.kernel.workspace_bytes, automatic_budget
        )
        self._allocate(self._plan(limit))

    # -- one step ---------------------------------------------------------------------------------

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Activation = Activation.SILU,
    ) -> torch.Tensor:
        """Run one MoE layer.

        Args:
            layer: position of the layer among the model's MoE layers.
            x: [tokens, hidden] bfloat16 or float16, the router's input.
            topk_weights: [tokens, top_k] float32.
            topk_ids: [tokens, top_k] int, local experts; negative where another rank has the expert.
            activation: of the gated expert.

        Returns:
            [tokens, hidden], the weighted sum over each token's experts on this rank.

        Raises:
            TransferError: an expert could not be fetched; the runtime can serve the next step.
        """
        tokens, top_k = topk_ids.shape
        if tokens == 0:
            return torch.empty_like(x)
        if self._late:
            self._release_late()
        groups = group_by_expert(topk_ids)
        plan = self.policy.plan(Routing(layer, topk_ids, topk_weights, tuple(groups)))
        wanted = {expert: tier for expert, tier in plan.items() if self._bits[tier] > 0}
        computed = sum(groups[expert].size for expert in wanted)
        # Pairs that nobody computes (skipped, or another rank's) must add nothing.
        allocate = x.new_empty if computed == tokens * top_k else x.new_zeros
        out = allocate((tokens * top_k, x.shape[1]))
        self._run(layer, wanted, groups, x, out, activation)
        return combine(out, topk_weights)

    def _run(
        self,
        layer: int,
        wanted: Mapping[int, Tier],
        groups: Mapping[int, Group],
        x: torch.Tensor,
        out: torch.Tensor,
        activation: Activation,
    ) -> None:
        """Compute the experts that are there, and the others as they arrive."""
        cache, engine = self.cache, self.engine
        # Every hit is pinned before the first miss is acquired: a miss must not evict what this step still reads.
        hits, misses = cache.acquire_held(layer, wanted)
        held, missing, streamed = set(hits), deque(misses), self._streamed(layer, wanted) if misses else frozenset()
        arriving = deque(version for version in hits if not version.resident)

        def fetch() -> None:
            """Start as many transfers as there are slots for."""
            while missing:
                expert, tier = missing[0]
                version = cache.acquire(layer, expert, tier, stream=tier in streamed)
                if version is None:
                    return
                held.add(version)
                missing.popleft()
                key = BlobKey(layer, expert, self._bits[tier])
                slot = version.slot
                version.ticket = engine.submit(key, slot.blob, Reason.DEMAND, slot.last_read)
                arriving.append(version)

        def receive() -> Version:
            version = arriving.popleft()
            engine.wait(version.ticket)
            cache.publish(version)
            return version

        def compute(versions: Sequence[Version]) -> None:
            work = [ExpertWork(*version.slot.expert, *groups[version.expert][:2]) for version in versions]
            self.kernel.forward(x, work, out, activation)
            last_read = engine.fence()
            for version in versions:
                held.discard(version)
                cache.release(version, last_read)

        ready = [version for version in hits if version.resident]
        try:
            while missing or arriving or ready:
                fetch()
                if not (arriving or ready):  # late reads have the staging slots: make do with what the layer keeps
                    streamed = frozenset()
                    fetch()
                together = engine.occupies_cores
                if arriving and (together or not ready):
                    ready.append(receive())
                    while together and arriving:
                        ready.append(receive())
                if not ready:  # with nothing held a slot could be had, but for late reads
                    raise TransferError(
                        "every slot that could take another expert belongs to a read that has not ended "
                        f"({self.store.description}); check the disk."
                    )
                compute(ready)
                ready = []
        except BaseException:
            self._let_go(held)
            raise

    def _streamed(self, layer: int, wanted: Mapping[int, Tier]) -> frozenset[Tier]:
        """Tiers of which the step needs more experts than the layer may keep."""
        demand = Counter(wanted.values())
        return frozenset(tier for tier, count in demand.items() if count > self.cache.quota(layer, tier))

    def _let_go(self, held: set[Version]) -> None:
        """After a failure in the middle of a step: no slot stays pinned, none is freed while it is written."""
        for version in held:
            if version.ticket is not None:
                self.engine.cancel(version.ticket)
        for version in held:
            if not version.resident:
                settled = version.ticket is None or self.engine.settle(version.ticket)
                self.cache.abandon(version)
                if not settled:
                    self._late.append(version)
                    continue
            self.cache.release(version)

    def _release_late(self) -> None:
        """Take back the slots of reads that have ended after whoever waited for them had given up."""
        late, self._late = self._late, []
        for version in late:
            if self.engine.settle(version.ticket):
                self.cache.release(version)
            else:
                self._late.append(version)

    # -- memory -----------------------------------------------------------------------------------

    def resize(self, budget: Any) -> None:
        """Change the expert budget between two steps; the cache starts empty.

        Args:
            budget: as the option ``expert_budget``.

        Raises:
            ValueError: it is not a budget, or cannot hold one expert of each tier, or a read of a failed step still
                has not ended; the old one stays.
        """
        self._release_late()
        if self._late:
            raise ConfigError(
                f"vllm-dymoe: expert_budget cannot change while {len(self._late)} reads of failed steps have not ended "
                f"({self.store.description}); try again later."
            )
        limit = limit_in_bytes(
            ExpertBudget.parse(budget),
            self.experts,
            self.options,
            self.kernel.workspace_bytes,
            self._automatic_budget,
        )
        plan = self._plan(limit)
        self.cache.clear()
        self._allocate(plan)

    @property
    def minimum_budget(self) -> int:
        """The smallest feasible budget in bytes."""
        return minimum_budget(self.experts, self.options, self.policy.tiers, self.kernel.workspace_bytes)

    def _plan(self, limit: int) -> SlotPlan:
        return plan_slots(self.experts, self.options, self.policy.tiers, limit, self.kernel.workspace_bytes)

    def _allocate(self, plan: SlotPlan) -> None:
        """Replace budget, pools and cache by those of ``plan``; nothing may be pinned."""
        for name in ("cache", "pools"):
            self.__dict__.pop(name, None)  # the old pools go before the new ones come
        self.plan = plan
        self.budget = BudgetTracker(plan.limit)
        if plan.workspace_bytes:
            self.budget.reserve("the kernel's workspace", plan.workspace_bytes)
        self.pools: dict[Tier, SlotPool] = {}
        for tier, count in plan.slots.items():
            fmt = self.experts.formats[tier_bits(self.options, tier)]
            self.budget.reserve(f"{count} slots of tier {tier.value}", count * fmt.nbytes)
            self.pools[tier] = self._make_pool(fmt, count)
        self.cache = ExpertCache(self.pools, len(self.experts.layers), plan.staging, self._cache_stats)

    def _make_pool(self, fmt: ExpertFormat, count: int) -> SlotPool:
        """Slots whose memory is there from now on, whatever other processes take later.

        Raises:
            ConfigError: another process has taken it already.
        """
        nbytes = count * fmt.nbytes
        if self.device.type == "cpu":
            available = available_host_memory()
            if available < nbytes:
                raise ConfigError(
                    f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of host "
                    "memory are available; lower expert_budget, or end what else takes memory."
                )
        try:
            return SlotPool(fmt, count, self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self.device.type} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error

    # -- seeing inside ----------------------------------------------------------------------------

    def stats(self) -> RuntimeStats:
        """Counts since the start or the last ``reset_stats``."""
        return RuntimeStats.collect(self.cache, self.engine.stats, self.budget, self.plan)

    def reset_stats(self) -> None:
        """Count from zero, for instance after warm-up."""
        self._cache_stats = self.cache.stats = CacheStats()
        self.engine.stats = TransferStats()

    def close(self) -> None:
        """End the transfer threads and close the store."""
        self.engine.close()
        self.store.close()

    def check_integrity(self) -> None:
        """Between steps: nothing pinned, no slot lost, the budget kept.

        Raises:
            AssertionError: it is not so.
        """
        self._release_late()
        self.cache.check_integrity()
        assert all(version.pins == 0 for version in self.cache.handles.versions()), "something is pinned between steps"
        assert self.budget.peak <= self.budget.limit
