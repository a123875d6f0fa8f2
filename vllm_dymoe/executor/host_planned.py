"""One rank's layers: what happens between steps, and a layer's forward on a CPU.

On a CPU one native call runs a layer (``cpu_executor``). It is planned here only if an expert has to come from disk, or
without the native library: precisions are chosen, experts are computed as they arrive, and their outputs are added in
the router's order at the end, so that neither residency nor timing changes a bit (invariant 1).
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from vllm_dymoe.cache.counters import PrefetchStats, ResidencyCounts
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.device_table import DeviceWaits
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.migration import Agree, Migration
from vllm_dymoe.cache.store.disk import DiskCounts
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.executor.cpu_executor import CpuExecutor
from vllm_dymoe.executor.prefetcher import Prefetcher
from vllm_dymoe.executor.streamed_layer import LayerStep
from vllm_dymoe.kernels import Activation, CpuKernel, combine
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.link_share import HostWaits, LinkShare
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.rule import actions_of
from vllm_dymoe.planner.table import CODES
from vllm_dymoe.policies import Policy
from vllm_dymoe.prefetch import Measured

_FAR = 1 << 40  # rows of an expert that the CPU never computes


@dataclass(frozen=True)
class StepCounts:
    """Statistics of steps, which outlive resizes and changes of policy."""

    residency: ResidencyCounts = field(default_factory=ResidencyCounts)
    prefetch: PrefetchStats = field(default_factory=PrefetchStats)
    disk: DiskCounts = field(default_factory=DiskCounts)  # what was read from files


class HostPlannedLayers:
    """One rank's layers.

    An object is for one allocation of slots and one policy. A resize or a change of policy builds a new one, which
    continues the counts of the old one.

    Args:
        fetcher: brings experts into the cache's slots.
        kernel: computes on a CPU; None with a GPU, whose steps are its own.
        policy: chooses precisions.
        bits: bits of each precision; 0 for one that is skipped.
        predictor: predicts experts of later layers; None if the host uses no predictions.
        counts: statistics that outlive this object.
        executes_in_place: compute misses where they are in host memory, as the table's costs say.
        cpu: runs layers whose experts are in memory; None with a device, and without the native library.
        migration: moves versions between steps; None if steps fetch what they need.
        records_actions: write each expert's action into ``Routing.actions``.
        agree: exchanges values with ranks that have other parts of the same experts.
        device_waits: what a device's steps have waited for the link, and the thresholds there that follow it; None
            without a device.
    """

    def __init__(
        self,
        fetcher: Fetcher[DeviceCache],
        kernel: CpuKernel | None,
        policy: Policy,
        bits: Mapping[Precision, int],
        predictor: Measured | None,
        counts: StepCounts,
        *,
        executes_in_place: bool = False,
        cpu: CpuExecutor | None = None,
        migration: Migration | None = None,
        records_actions: bool = False,
        agree: Agree = list,
        device_waits: DeviceWaits | None = None,
    ) -> None:
        self.fetcher, self.cache, self.engine, self._kernel = fetcher, fetcher.cache, fetcher.engine, kernel
        self.policy, self.bits, self.predictor = policy, bits, predictor
        self.counts, self.prefetch_stats, self.disk = counts.residency, counts.prefetch, counts.disk
        self.executes_in_place, self.cpu = executes_in_place, cpu
        self.migration, self.records_actions = migration, records_actions
        self.prefetcher: Prefetcher | None = None
        self._observed = True  # tokens belong to requests
        thresholds, share = policy.precision.thresholds, policy.precision.link_share
        waits = device_waits or HostWaits(lambda: self.engine.stats.exposed_wait_seconds)
        self.link_share = None if share is None else LinkShare(thresholds, share, waits, agree)
        self._device_waits = device_waits
        if predictor is not None:
            predictor.predictor.slots_changed()
            experts = self.cache.experts
            layers = len(experts.layers) - experts.draft_layers
            self.prefetcher = Prefetcher(fetcher, layers, policy, self.prefetch_stats)

    # -- between steps ----------------------------------------------------------------------------

    def end(self) -> bool:
        """Stop background work before slots are freed.

        Returns:
            whether every read has ended.
        """
        if self.migration is not None:
            self.migration.stop()
        return self.settle()

    def settle(self) -> bool:
        """Wait for transfers in flight and drop prefetched experts.

        Returns:
            whether every read has ended.
        """
        if self.prefetcher is not None:
            self.prefetcher.clear()
        return self.fetcher.settle_all()

    def begin_step(self, phase: Phase) -> None:
        """Begin a step of requests, before its first MoE layer."""
        if self.cpu is not None:
            self.cpu.begin_step()
        if self.migration is not None:
            self.migration.turn()
        if self.link_share is not None:
            self.link_share.begin_step(phase)
            if self._device_waits is not None:
                self._device_waits.follow(self.policy.precision.thresholds)
        if self.predictor is not None:
            self.predictor.begin_step(phase)
        prefetch = self.policy.prefetch
        asked = phase is Phase.PREFILL and prefetch is not None and prefetch.first_layer
        if asked and self.predictor is not None and self.prefetcher is not None:
            self.prefetcher.predict_first_layer(phase, self.predictor)

    @property
    def needs_python(self) -> bool:
        """Whether layers need Python although their experts are in memory.

        It observes routing for a predictor or a migration, or collects late reads.
        """
        watching = self.predictor is not None or (self.migration is not None and self.migration.measuring)
        return self.cpu is None or watching or bool(self.fetcher.orphaned)

    def end_decode(self, tokens: int) -> None:
        """Record a step of requests that ran, or is about to run, without the host."""
        if self.migration is not None:
            self.migration.count_decoded(tokens)

    # -- in a step --------------------------------------------------------------------------------

    @property
    def kernel(self) -> CpuKernel:
        assert self._kernel is not None, "a GPU runs its own steps"
        return self._kernel

    def forward(self, routing: Routing, activation: Activation = Activation.SILU) -> torch.Tensor:
        """Run one MoE layer.

        The next step can still be served after an error.

        Returns:
            [tokens, hidden], the weighted sum over each token's experts on this rank.

        Raises:
            TransferError: an expert could not be fetched.
            RoutingError: an id outside of the experts.
        """
        if routing.ids.shape[0] == 0:
            return torch.empty_like(routing.x)
        if self.fetcher.orphaned:
            self.fetcher.collect()
        plan: LayerPlan | None = None
        if self.cpu is not None:  # which checks the ids itself
            result = self.cpu.run(routing, activation, observed=self._observed)
            if self.migration is not None:
                self.migration.see(routing)
            if isinstance(result, torch.Tensor):
                if self.predictor is not None:
                    self._served(routing)
                return result
            plan = result
        else:
            routing.check(self.cache.experts.num_experts)
        plan = self._plan(routing) if plan is None else plan
        self._begin_plan(routing, plan)
        x, weights = routing.inputs()
        out = x.new_empty((routing.ids.numel(), x.shape[1]))
        self._run(routing, plan, x, out, activation)
        if plan.bounds[-1] == len(out):
            return combine(out, weights)
        skipped = set(routing.active) - set(plan.experts.tolist())
        return combine(out, weights, routing.ids, skipped, renormalize=self.policy.precision.renormalizes)

    def _run(
        self, routing: Routing, plan: LayerPlan, x: torch.Tensor, out: torch.Tensor, activation: Activation
    ) -> None:
        """Carry out a plan.

        Args:
            x: [rows, hidden].
            out: [tokens * top_k, hidden].

        Raises:
            TransferError: as in :meth:`forward`.
        """
        layer, on_cpu = routing.layer, plan.on_cpu
        kept = sorted({*range(len(plan.views))} - {*on_cpu})  # items whose experts are in slots, or get one
        self.counts.cpu_executed += len(on_cpu)
        self.counts.misses += len(on_cpu)
        look_ahead = None
        if self.predictor is not None and layer < routing.num_layers:  # a draft's layers are not predicted
            look_ahead = partial(self._look_ahead, routing)
        in_slots = plan.select(kept)
        if (in_slots.action == Action.HIT).all():
            self.counts.hits += len(kept)
            if self.prefetcher is not None:
                self.prefetcher.claim(layer, {})
            if look_ahead is not None:
                look_ahead()
            self._compute(layer, plan, x, out, activation)
            if self.prefetcher is not None:
                self.prefetcher.fill()
        else:
            in_turn = self.engine.occupies_cores or not self.policy.residency.overlaps
            given = self.fetcher, self.prefetcher, self.kernel, self.counts
            step = LayerStep(layer, in_slots, *given, in_turn=in_turn)
            step.acquire()
            step.run(x, out, activation, look_ahead)
            if on_cpu:
                self._compute(layer, plan.select(on_cpu), x, out, activation)
        if on_cpu and (sentence := self.cache.lost(layer, plan.select(on_cpu).wanted)):
            raise TransferError(sentence)

    def _served(self, routing: Routing) -> None:
        """Release a layer's predictions, and request those of later layers.

        Called after the CPU executor has run the layer.
        """
        if self.prefetcher is not None:
            self.prefetcher.claim(routing.layer, {})
        if routing.layer < routing.num_layers:
            self._look_ahead(routing)
        if self.prefetcher is not None:
            self.prefetcher.fill()

    def _begin_plan(self, routing: Routing, plan: LayerPlan) -> None:
        """Count a plan's precisions, and place the items that are computed in place."""
        cache, layer, wanted = self.cache, routing.layer, plan.wanted
        self.counts.planned.update(wanted.values())
        self.counts.planned[Precision.SKIPPED] += len(routing.active) - len(wanted)
        if on_cpu := plan.on_cpu:
            parts = {
                precision: tuple(cache.bits[part] for part in cache.parts[precision])
                for precision in set(wanted.values())
            }
            experts = list(wanted.items())
            for item, (expert, precision) in ((item, experts[item]) for item in on_cpu):
                plan.place(item, cache.in_store(layer, expert, parts[precision]))

    def _plan(self, routing: Routing) -> LayerPlan:
        """Choose precisions, and plan with NumPy."""
        layer, bits = routing.layer, self.bits
        chosen = self.policy.precision.select(routing)
        wanted = {expert: precision for expert in routing.active if bits[precision := chosen[expert]] > 0}
        experts = np.fromiter(wanted, np.int64, len(wanted))
        codes = np.fromiter(map(CODES.__getitem__, wanted.values()), np.int8, len(wanted))
        if self.migration is not None:
            uses = np.fromiter(map(routing.counts.__getitem__, wanted), np.int64, len(wanted))
            uses = uses if routing.uses is None else routing.uses[experts]
            self.migration.count(routing, experts, uses)
        rows = None
        if self.executes_in_place:
            rows = np.fromiter(map(routing.counts.__getitem__, wanted), np.int64, len(wanted))
            if not self.cache.store.whole:
                rows[self.cache.far(layer, wanted)] = _FAR
        counted = None if routing.uses is None else routing.uses[experts] > 0
        places = self.cache.table.begin_step(layer, experts, codes, rows, counted=counted)
        if self.records_actions:
            held = self.cache.table.precision[layer]
            routing.actions = torch.from_numpy(actions_of(routing.host_ids, experts, codes, held, places))
        return LayerPlan.on_host(routing.grouped, experts, codes, places, row_for_each_pair=routing.weights_on_input)

    def _compute(self, layer: int, plan: LayerPlan, x: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
        """Compute in one call what needs no transfer.

        These are the items that have a place, and the experts in slots.
        """
        if not plan.views:
            return
        self.kernel.begin(x, plan, out, activation)
        for item, (expert, precision) in enumerate(plan.wanted.items()):
            if plan.views[item] is None:
                held, parts = self.cache.resident(layer, expert, precision)
                self.counts.reuses += held is not precision
                plan.place(item, self.cache.packed(parts))
        self.kernel.compute(range(len(plan.views)))

    def _look_ahead(self, routing: Routing) -> None:
        """Show the predictor the router's choice.

        Its predictions are offered to the prefetcher.
        """
        predictor = self.predictor
        assert predictor is not None
        predictor.observe(routing)
        if self.prefetcher is not None:
            self.prefetcher.look_ahead(routing.layer, routing.phase, predictor)

    # -- counts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Context in which steps are not counted, predicted or learnt from.

        It is for dummy tokens, often thousands of equal ones. Experts that they fetch may stay, but scores and
        thresholds do not change.
        """
        table, thresholds = self.cache.table, self.policy.precision.thresholds
        learnt = [(column, column.copy()) for column in (table.score, table.used_at, table.step, *thresholds)]
        before, disk = (self.counts, self.predictor, self.migration), self.disk
        read = disk.reads, disk.nbytes, disk.seconds
        self.counts, self.predictor, self.migration, self._observed = ResidencyCounts(), None, None, False
        try:
            with self.engine.uncounted():
                yield
        finally:
            self._observed = True
            self.counts, self.predictor, self.migration = before
            disk.reset(read)
            for column, values in learnt:
                column[:] = values

    def reset_stats(self) -> None:
        self.counts.reset()
        self.engine.reset_stats()
        self.prefetch_stats.reset()
        if self.migration is not None:
            self.migration.reset_stats()
        if self.predictor is not None:
            self.predictor.reset_stats()
        self.disk.reset()

    def on_their_way(self) -> Iterator[Fetch]:
        """Yield fetches in flight that no step has waited for."""
        yield from self.fetcher.orphaned
        if self.prefetcher is not None:
            yield from self.prefetcher.ahead
        if self.migration is not None:
            yield from self.migration.flying
