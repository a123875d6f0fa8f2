"""The forward of one MoE layer: plan, acquire, compute, combine.

Every result goes to its own row, and the rows are added in the router's order at
the end. So neither the cache nor the timing of a transfer can change a bit of the
output (invariant 1); in which order experts are fetched and computed is
``pipeline``'s.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.experts.budget import BudgetTracker
from vllm_dymoe.experts.cache import CacheStats, ExpertCache
from vllm_dymoe.experts.layout import ExpertFormat
from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.experts.slots import SlotPool
from vllm_dymoe.experts.store import HostStore
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.kernels import Activation, ExpertKernel, combine, make_kernel
from vllm_dymoe.policy import Policy, make_policy
from vllm_dymoe.predict import Measured, PredictionStats, Predictor
from vllm_dymoe.runtime.device_memory import make_device_memory
from vllm_dymoe.runtime.pipeline import Pipeline
from vllm_dymoe.runtime.precision import changed_precision
from vllm_dymoe.runtime.prefetch import Prefetcher, PrefetchStats
from vllm_dymoe.runtime.sizing import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    tier_bits,
    workspace_bytes,
)
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.transfer import (
    CudaClock,
    HostClock,
    Lane,
    Timeline,
    TransferEngine,
    TransferStats,
    make_engine,
)


class MoERuntime:
    """Every MoE layer of one model on one rank.

    Args:
        store: the experts' packed bytes.
        options: validated options.
        device: where slots are and computation happens.
        automatic_budget: bytes to use if ``options.expert_budget`` is automatic.
        policy: in place of the one that the options name.
        engine: in place of the one that fits the device.
        predictor: names experts to fetch ahead; None for none.

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
        predictor: Predictor | None = None,
    ) -> None:
        self.store = store
        self.experts = store.experts
        self.device = device
        self._memory = make_device_memory(device)
        policy = policy or make_policy(options.policy, options.policy_options)
        self.kernel: ExpertKernel = make_kernel(
            device,
            workspace_bytes(self.experts, device.type),
            [matrix for fmt in self.experts.formats.values() for matrix in fmt.matrices],
        )
        largest = max(fmt.nbytes for fmt in self.experts.formats.values())
        self.engine = engine or make_engine(
            store, device, options.io_threads, largest, options.transfer_timeout_s or None, options.link_gbps
        )
        self.predictor = None if predictor is None else Measured(predictor)
        self._automatic_budget = automatic_budget
        self._planned: Counter[Tier] = Counter()
        self._cache_stats, self._prefetch_stats = CacheStats(), PrefetchStats()
        self._expert_budget = options.expert_budget
        self._allocate(options, policy, self._plan(self._limit(options), options, policy))

    # -- one step ---------------------------------------------------------------------------------

    def forward(self, routing: Routing, activation: Activation = Activation.SILU) -> torch.Tensor:
        """Run one MoE layer.

        Args:
            routing: of [tokens, top_k].
            activation: of the gated expert.

        Returns:
            [tokens, hidden], the weighted sum over each token's experts on this rank.

        Raises:
            TransferError: an expert could not be fetched; the runtime can serve the next step.
        """
        if len(routing.ids) == 0:
            return torch.empty_like(routing.x)
        timeline = self.engine.timeline
        if timeline is None:
            return self._forward(routing, activation)
        begin = time.perf_counter()
        try:
            return self._forward(routing, activation)
        finally:
            end, what = time.perf_counter(), f"layer {routing.layer}"
            timeline.add(Lane.HOST, what, "layer", begin, end, tokens=len(routing.ids), phase=routing.phase.value)

    def _forward(self, routing: Routing, activation: Activation) -> torch.Tensor:
        layer, x = routing.layer, routing.x
        tokens, top_k = routing.ids.shape
        groups = routing.groups
        plan = self.policy.plan(routing)
        wanted = {expert: tier for expert, tier in plan.items() if self._bits[tier] > 0}
        self._planned.update(wanted.values())
        self._planned[Tier.SKIP] += len(plan) - len(wanted)
        out = x.new_empty((tokens * top_k, x.shape[1]))
        look_ahead = None if self.predictor is None else partial(self._look_ahead, self.predictor, routing)
        self._pipeline.run(layer, wanted, groups, x, out, activation, look_ahead)
        if sum(groups[expert].size for expert in wanted) == tokens * top_k:
            return combine(out, routing.weights)
        renormalize = self.options.skipped_weights == "renormalize"
        return combine(out, routing.weights, routing.ids, plan.keys() - wanted.keys(), renormalize=renormalize)

    def _look_ahead(self, predictor: Measured, routing: Routing) -> Callable[[], None] | None:
        """Tell the predictor what the router decided, and the prefetcher what the predictor makes of it.

        Returns:
            The latter, to be done once experts are computing, where the prediction is computed beside them.
        """
        begin = time.perf_counter()
        predictor.observe(routing)
        act = None if self._prefetcher is None else self._prefetcher.look_ahead(routing.layer, routing.phase, predictor)
        timeline = self.engine.timeline
        if timeline is not None:
            timeline.add(Lane.HOST, f"predict after layer {routing.layer}", "predict", begin, time.perf_counter())
        return act

    # -- memory -----------------------------------------------------------------------------------

    def resize(self, budget: Any) -> None:
        """Change the expert budget between two steps; the cache starts empty.

        The old slots' memory goes back to the device, so that what a smaller budget leaves is there for others.

        Args:
            budget: as the option ``expert_budget``.

        Raises:
            ValueError: it is not a budget, or cannot hold one expert of each tier, or the device has not so much, or a
                read that was given up still has not ended; the old one stays.
        """
        before = self._expert_budget
        self._expert_budget = ExpertBudget.parse(budget)
        try:
            plan = self._plan(self._limit(self.options), self.options, self.policy)
            self._replace("expert_budget", self.options, self.policy, plan)
        except ValueError:
            self._expert_budget = before
            raise

    def set_precision(self, **changes: Any) -> None:
        """Change retention, tiers or another parameter of the policy, for the next step on.

        The budget stays as it is. Where its slots have to be shared out in another way the cache starts empty.

        Args:
            changes: values by name, as :func:`~vllm_dymoe.runtime.precision.changed_precision` takes them.

        Raises:
            ConfigError: a value cannot be honoured, or a read that was given up still has not ended; all stays as it
                was.
        """
        options = changed_precision(self.options, self.experts.formats, changes)
        policy = make_policy(options.policy, options.policy_options)
        plan = self._plan(self.plan.limit, options, policy)
        if plan == self.plan and all(tier_bits(options, tier) == self._bits[tier] for tier in plan.slots):
            self._serve_with(options, policy)
        else:
            self._replace("the precision", options, policy, plan)

    def set_predictor(self, predictor: Predictor) -> None:
        """Foresee with another predictor, for the next step on.

        Where it takes other memory than the one before, the slots are shared out again and the cache starts empty.

        Raises:
            ConfigError: the budget has no room for it, or a read that was given up still has not ended; the old one
                goes on.
        """
        before = self.predictor
        self.predictor = Measured(predictor, before.stats if before else None)
        try:
            if before is None or before.nbytes != self.predictor.nbytes:
                plan = self._plan(self._limit(self.options), self.options, self.policy)
                self._replace("the predictor", self.options, self.policy, plan)
        except ConfigError:
            self.predictor = before
            raise

    def _replace(self, what: str, options: Options, policy: Policy, plan: SlotPlan) -> None:
        """Go on with other slots; if they cannot be had, with the old ones.

        Raises:
            ConfigError: a read that was given up still writes into a slot, so that ``what`` cannot change; or there is
                no memory.
        """
        self._pipeline.release_late()
        ahead_is_clear = self._prefetcher is None or self._prefetcher.clear()
        if self._pipeline.late or not ahead_is_clear:
            raise ConfigError(
                f"vllm-dymoe: {what} cannot change while reads that were given up have not ended "
                f"({self.store.description}); try again later."
            )
        self._check_growth(plan, self._slot_bytes(options, plan))
        before = self.options, self.policy, self.plan
        self.cache.clear()
        self._free_slots()
        try:
            self._allocate(options, policy, plan)
        except ConfigError:
            self._free_slots()
            self._allocate(*before)
            raise

    def _check_growth(self, plan: SlotPlan, wanted: int) -> None:
        """Refuse more slots than the device has memory for, before the old ones are gone.

        Raises:
            ConfigError: there is not enough beside what computation takes.
        """
        if plan.limit <= self.plan.limit:  # the device has given as much before
            return
        held = sum(pool.nbytes for pool in self.pools.values())
        available, computation = self._memory.available(), self._memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes."
            )

    def _free_slots(self) -> None:
        """Give the slots' memory back, to this process and to others; nothing may be pinned."""
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
        self._memory.available()

    @property
    def free_device_bytes(self) -> int:
        """Bytes of the device's memory that are free for anybody."""
        return self._memory.available()

    @property
    def minimum_budget(self) -> int:
        """The smallest feasible budget in bytes."""
        return minimum_budget(self.experts, self.options, self.policy.tiers, self._beside_experts)

    @property
    def _beside_experts(self) -> int:
        """Bytes of the budget that are no slots: the kernel's workspace and the predictor."""
        return self.kernel.workspace_bytes + (0 if self.predictor is None else self.predictor.nbytes)

    @property
    def _where(self) -> str:
        """Whose memory the slots are in, for people."""
        return "host" if self.device.type == "cpu" else "device"

    def _limit(self, options: Options) -> int:
        return limit_in_bytes(self._expert_budget, self.experts, options, self._beside_experts, self._automatic_budget)

    def _plan(self, limit: int, options: Options, policy: Policy) -> SlotPlan:
        shares = policy.shares(len(self.experts.layers), self.experts.top_k)
        return plan_slots(self.experts, options, policy.tiers, limit, self._beside_experts, shares)

    def _serve_with(self, options: Options, policy: Policy) -> None:
        self.options, self.policy = options, policy
        self._bits = {tier: tier_bits(options, tier) for tier in Tier}

    def _slot_bytes(self, options: Options, plan: SlotPlan) -> int:
        formats = self.experts.formats
        return sum(count * formats[tier_bits(options, tier)].nbytes for tier, count in plan.slots.items())

    def _allocate(self, options: Options, policy: Policy, plan: SlotPlan) -> None:
        """Replace options, policy, budget, pools and cache; the old pools are gone, so that there is one at a time."""
        self._serve_with(options, policy)
        self.plan = plan
        self.budget = BudgetTracker(plan.limit)
        if plan.workspace_bytes:
            self.budget.reserve("the kernel's workspace and the predictor", plan.workspace_bytes)
        self.pools: dict[Tier, SlotPool] = {}
        for tier, count in plan.slots.items():
            fmt = self.experts.formats[self._bits[tier]]
            self.budget.reserve(f"{count} slots of tier {tier.value}", count * fmt.nbytes)
            self.pools[tier] = self._make_pool(fmt, count)
        filled = self.engine.fence()
        for pool in self.pools.values():
            pool.fence(filled)
        self.cache = ExpertCache(
            self.pools, plan.quotas, self.experts.num_experts, self._cache_stats, reuse_high=options.reuse_high
        )
        self._prefetcher = None if self.predictor is None else self._make_prefetcher()
        self._pipeline = Pipeline(
            self.cache, self.engine, self.kernel, self._bits, self.store.description, self._prefetcher
        )

    def _make_prefetcher(self) -> Prefetcher:
        """For the first tier of the policy, the high one if it uses both."""
        tier = next(iter(self.pools))
        projections = self.options.prefetch_projections
        return Prefetcher(self.cache, self.engine, tier, self._bits[tier], projections, self._prefetch_stats)

    def _make_pool(self, fmt: ExpertFormat, count: int) -> SlotPool:
        """Slots whose memory is there from now on, whatever other processes take later.

        Raises:
            ConfigError: another process has taken it already.
        """
        nbytes = count * fmt.nbytes
        available = self._memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            return SlotPool(fmt, count, self.device)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error

    # -- seeing inside ----------------------------------------------------------------------------

    def start_timeline(self) -> None:
        """Take note of what runs when, from now on; what was noted before is dropped."""
        clock = HostClock() if self.device.type == "cpu" else CudaClock(self.device)
        self.engine.timeline = Timeline(clock)

    def stop_timeline(self, rank: int = 0) -> list[dict[str, Any]]:
        """What ran since ``start_timeline``, as Chrome trace events.

        Args:
            rank: the process that they are shown as.

        Raises:
            ValueError: nobody has started one.
        """
        timeline, self.engine.timeline = self.engine.timeline, None
        if timeline is None:
            raise ValueError("vllm-dymoe: no timeline was started; start one before what it is to show.")
        return timeline.events(rank)

    def stats(self) -> RuntimeStats:
        """Counts since the start or the last ``reset_stats``."""
        return RuntimeStats.collect(
            self._planned,
            self.cache,
            self.engine.stats,
            self._prefetch_stats,
            self._prefetcher.intervals if self._prefetcher else {},
            self.predictor,
            self.budget,
            self.plan,
        )

    def precision(self) -> dict[str, Any]:
        """What decides precision at the moment, and what it means for a single token, as JSON-serialisable data."""
        options, layers, top_k = self.options, len(self.experts.layers), self.experts.top_k
        shares = self.policy.shares(layers, top_k)
        return {
            "policy": options.policy,
            "policy_options": dict(options.policy_options),
            "hi": options.hi,
            "lo": options.lo,
            "skipped_weights": options.skipped_weights,
            "stored_bits": sorted(self.experts.formats, reverse=True),
            "share_of_tiers_in_decode": {tier.value: sum(shares[tier]) / layers for tier in Tier if tier in shares},
            "slots": {tier.value: count for tier, count in self.plan.slots.items()},
        }

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """For what was made up, often thousands of tokens all alike: nobody counts it, foresees or learns from it."""
        before = self._planned, self._cache_stats, self.engine.stats, self.predictor
        self._planned, self._cache_stats, self.engine.stats = Counter(), CacheStats(), TransferStats()
        self.cache.stats, self.predictor = self._cache_stats, None
        try:
            yield
        finally:
            self._planned, self._cache_stats, self.engine.stats, self.predictor = before
            self.cache.stats = self._cache_stats

    def reset_stats(self) -> None:
        """Count from zero."""
        self._planned.clear()
        self._cache_stats = self.cache.stats = CacheStats()
        self.engine.stats = TransferStats()
        self._prefetch_stats.reset()
        if self.predictor is not None:
            self.predictor.stats, self.predictor.seconds = PredictionStats(), 0.0

    def close(self) -> None:
        """End the transfer threads and close the store."""
        self.engine.close()
        self.store.close()

    def check_integrity(self) -> None:
        """Between steps: nothing pinned, no slot lost, the budget kept.

        Raises:
            AssertionError: it is not so.
        """
        self._pipeline.release_late()
        self.cache.check_integrity()
        pinned = sum(version.pins > 0 for version in self.cache.handles.versions())
        ahead = 0 if self._prefetcher is None else self._prefetcher.fetched_ahead
        assert pinned == ahead, f"{pinned} experts are pinned between steps, of which {ahead} were fetched ahead"
        assert self.budget.peak <= self.budget.limit
