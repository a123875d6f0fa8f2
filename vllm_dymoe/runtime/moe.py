"""The forward of one MoE layer: tiers, rule, compute, combine.

Every result goes to its own row, and the rows are added in the router's order at
the end. So neither what is on the device nor the timing of a transfer can change a
bit of the output (invariant 1); in which order experts are fetched and computed is
``stream``'s.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.experts.budget import BudgetTracker
from vllm_dymoe.experts.residency import HIT
from vllm_dymoe.experts.routing import Phase, Routing
from vllm_dymoe.experts.slots import Slot
from vllm_dymoe.experts.table import CODES
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.kernels import Activation, CpuKernel, ExpertKernel, LayerWork, combine, make_kernel
from vllm_dymoe.observe.timeline import CudaClock, HostClock, Lane, Timeline
from vllm_dymoe.predict import Measured, PredictionStats, Predictor
from vllm_dymoe.predict.on_device import on_device
from vllm_dymoe.runtime.ahead import Branch, make_branch
from vllm_dymoe.runtime.counters import ResidencyCounts
from vllm_dymoe.runtime.decided_memory import DecidedMemory
from vllm_dymoe.runtime.decisions import DRAFTED, device_decides
from vllm_dymoe.runtime.decode_path import DECODE_ROWS, DecodeKernel, DecodePath
from vllm_dymoe.runtime.decode_plain import PlainDecode
from vllm_dymoe.runtime.device_memory import make_device_memory
from vllm_dymoe.runtime.fetcher import Fetcher
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.migration import Agree, Migration
from vllm_dymoe.runtime.planned_memory import DecodeCounts, PlannedMemory
from vllm_dymoe.runtime.popularity import read_popularity
from vllm_dymoe.runtime.precision import changed_precision
from vllm_dymoe.runtime.prefetch import Prefetcher, PrefetchStats
from vllm_dymoe.runtime.sizing import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    slot_bits,
    tier_bits,
    workspace_bytes,
)
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.runtime.stream import LayerStep
from vllm_dymoe.store import HostStore, ReadableStore
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.transfer import TransferEngine, TransferStats, make_engine

_READERS = 1  # threads that read the host store ahead of the computation


class MoERuntime:
    """Every MoE layer of one model on one rank.

    Args:
        store: the experts' packed bytes.
        options: validated options.
        device: where slots are and computation happens.
        automatic_budget: bytes to use if ``options.expert_budget`` is automatic.
        system: in place of the one that the options name.
        engine: in place of the one that fits the device.
        predictor: names experts to fetch ahead; None for none.
        obstacle: why the host has to decide in decode, if the model is such a one.
        agree: with the ranks that have other parts of the same experts, for a system that moves versions.

    Raises:
        ConfigError: the budget cannot hold one expert of each tier that the system uses.
    """

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,
        system: System | None = None,
        engine: TransferEngine | None = None,
        predictor: Predictor | None = None,
        *,
        obstacle: str = "",
        agree: Agree = list,
    ) -> None:
        self.store = store
        self.experts = store.experts
        self.device = device
        self._device_memory = make_device_memory(device)
        system = system or make_system(options)
        self.kernel: ExpertKernel = make_kernel(
            device,
            workspace_bytes(self.experts, device.type),
            [matrix for fmt in self.experts.formats.values() for matrix in fmt.matrices],
        )
        largest = max(fmt.nbytes for fmt in self.experts.formats.values())
        self.engine = engine or make_engine(
            store, device, _READERS, largest, options.transfer_timeout_s or None, options.link_gbps
        )
        self.predictor = None if predictor is None else Measured(predictor)
        self._automatic_budget = automatic_budget
        self._counts, self._prefetch_stats = ResidencyCounts(), PrefetchStats()
        decides, self.host_decides_because = device_decides(
            options,
            system,
            device.type,
            readable=isinstance(store, ReadableStore),
            obstacle=DRAFTED if self.experts.draft_layers else obstacle,
        )
        self._migrates = system.migrating is not None
        kernel = self._decode_kernel(options) if decides else None
        self.memory = self.make_memory() if kernel is None else self.make_decided_memory()
        self.decode = None if kernel is None else self._make_decode_path(kernel, system)
        self._expert_budget, self._agree = options.expert_budget, agree
        self._popularity = read_popularity(self.experts, system)
        self._allocate(options, system, self._plan(self._limit(options), options, system))

    def make_memory(self) -> ExpertMemory:
        """Where this runtime keeps experts."""
        return ExpertMemory(self.experts, self.device, self._device_memory)

    def make_decided_memory(self) -> DecidedMemory:
        """The same where the device decides."""
        assert isinstance(self.store, ReadableStore)
        kind = PlannedMemory if self._migrates else DecidedMemory
        return kind(self.store, self.device, self._device_memory)

    def make_decode_kernel(self) -> DecodeKernel:
        """What decides and computes a decode step without the host."""
        if isinstance(self.kernel, CpuKernel):
            return PlainDecode(self.kernel, self.experts.formats)
        # Here and not above: importing triton takes a second, and nobody without a GPU needs it.
        from vllm_dymoe.runtime.decode_triton import TritonDecode

        return TritonDecode(self.kernel, self.experts, DECODE_ROWS)

    def make_branch(self) -> Branch:
        """Where a decode step without the host fetches ahead."""
        return make_branch(self.device)

    def _decode_kernel(self, options: Options) -> DecodeKernel | None:
        """None where the kernels cannot, so that the host decides after all.

        Raises:
            ConfigError: the device was to decide.
        """
        try:
            return self.make_decode_kernel()
        except ValueError as error:
            if options.decisions == "device":
                raise ConfigError(f'vllm-dymoe: decisions = "device" is impossible, because {error}.') from error
            self.host_decides_because = str(error)
            return None

    def _make_decode_path(self, kernel: DecodeKernel, system: System) -> DecodePath:
        assert isinstance(self.memory, DecidedMemory)
        path = DecodePath(self.experts, self.memory.decisions, kernel, self.device)
        named = None if self.predictor is None else on_device(self.predictor.predictor, self.device)
        if named is not None and system.projections_in_graph > 0 and not self.memory.decisions.nested:
            path.look_ahead(named, self.make_branch())
            self.memory.fetch_ahead(system.projections_in_graph)
        return path

    @property
    def hits(self) -> int:
        """Experts that were needed and there."""
        return self._counts.hits

    # -- one step ---------------------------------------------------------------------------------

    def begin_step(self, phase: Phase) -> None:
        """A step of requests begins, and its first MoE layer is some way off.

        Args:
            phase: of the step.
        """
        if self._migration is not None:
            self._migration.turn()
        asked = phase is Phase.PREFILL and self.system.foresees_first_layer
        if asked and self.predictor is not None and self._prefetcher is not None:
            self._prefetcher.foresee_first_layer(phase, self.predictor)

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
        self._enter_stream()
        begun, timeline = time.perf_counter(), self.engine.timeline
        try:
            layer, (x, groups, weights) = routing.layer, routing.work()
            tokens, top_k = routing.ids.shape
            tiers, bits = self.system.select(routing), self._bits
            wanted = {expert: tier for expert in groups if bits[tier := tiers[expert]] > 0}  # low at 0 bits is skipped
            planned = self._counts.planned
            planned.update(wanted.values())
            planned[Tier.SKIP] += len(tiers) - len(wanted)
            active = np.fromiter(wanted, np.int64, len(wanted))
            codes = np.fromiter(map(CODES.__getitem__, wanted.values()), np.int8, len(wanted))
            if self._fetcher.orphaned:
                self._fetcher.collect()
            if self._migration is not None:
                uses = np.fromiter((groups[expert].size for expert in wanted), np.int64, len(wanted))
                self._migration.count(layer, active, uses)
            places = self.memory.table.begin_step(layer, active, codes)
            out = x.new_empty((tokens * top_k, x.shape[1]))
            begin = partial(self.kernel.begin, x, groups, out=out, activation=activation)
            look_ahead = None
            if self.predictor is not None and layer < routing.num_layers:  # nobody foresees a draft's layers
                look_ahead = partial(self._look_ahead, self.predictor, routing)
            if timeline is None and (places == HIT).all():  # a timeline shows computation piece by piece
                self._run_residents(layer, wanted, begin, look_ahead)
            else:
                step = LayerStep(
                    layer,
                    wanted,
                    np.atleast_2d(places).T.tolist(),
                    self.memory,
                    self._fetcher,
                    self.engine,
                    self._prefetcher,
                    self._counts,
                    enqueues=self.kernel.asynchronous,
                    in_turn=self.engine.occupies_cores or not self.system.overlaps,
                )
                step.run(begin, look_ahead)
            if sum(groups[expert].size for expert in wanted) == tokens * top_k:
                return combine(out, weights)
            skipped = tiers.keys() - wanted.keys()
            return combine(out, weights, routing.ids, skipped, renormalize=self.system.renormalizes)
        finally:  # whether it could be computed or not
            if timeline is not None:
                ended, what = time.perf_counter(), f"layer {routing.layer}"
                timeline.add(Lane.HOST, what, "layer", begun, ended, tokens=len(routing.ids), phase=routing.phase.value)

    def _run_residents(
        self,
        layer: int,
        wanted: Mapping[int, Tier],
        begin: Callable[[Sequence[int]], LayerWork],
        look_ahead: Callable[[], Callable[[], None] | None] | None,
    ) -> None:
        """A layer whose experts are all there is computed at once, with nothing to wait for."""
        prefetcher, counts = self._prefetcher, self._counts
        if prefetcher is not None:
            prefetcher.claim(layer, {})
        act = None if look_ahead is None else look_ahead()
        order = list(wanted)
        work = begin(order)
        slots: list[Slot] = []
        for expert, tier in wanted.items():
            held, parts = self.memory.resident(layer, expert, tier)
            counts.reuses += held is not tier
            slots += parts
            work.place(expert, self.memory.packed(parts))
        counts.hits += len(order)
        if order:
            work.compute(order)
        if self.kernel.asynchronous:
            last_read = self.engine.fence()
            for slot in slots:
                slot.last_read = last_read
        if act is not None:
            act()
        if prefetcher is not None:
            prefetcher.fill()

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

    # -- whose steps run --------------------------------------------------------------------------

    def enter_decode(self) -> None:
        """Steps without the host begin: nothing of the host's may still write into a slot."""
        memory = self.memory
        if isinstance(memory, DecidedMemory) and memory.enter_decode():
            if self._prefetcher is not None:
                self._prefetcher.clear()
            ended = self._fetcher.settle_all()
            assert ended, "a copy from host memory has not ended"

    @property
    def counts_decoded(self) -> bool:
        """Whether ``end_decode`` needs what routers chose."""
        return self._migration is not None

    def end_decode(self, tokens: int) -> None:
        """A step of requests without the host has run, or will before anything else."""
        if self._migration is not None:
            self._migration.count_decoded(tokens)

    def _enter_stream(self) -> None:
        memory = self.memory
        if isinstance(memory, DecidedMemory) and not memory.streaming:
            assert self.decode is not None
            self.decode.settle()
            memory.enter_stream(self.engine.fence())

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
            plan = self._plan(self._limit(self.options), self.options, self.system)
            self._replace("expert_budget", self.options, self.system, plan)
        except ValueError:
            self._expert_budget = before
            raise

    def set_precision(self, **changes: Any) -> None:
        """Change retention, tiers or another parameter of the system, for the next step on.

        The budget stays as it is. Where its slots have to be shared out in another way the cache starts empty.

        Args:
            changes: values by name, as :func:`~vllm_dymoe.runtime.precision.changed_precision` takes them.

        Raises:
            ConfigError: a value cannot be honoured, or a read that was given up still has not ended; all stays as it
                was.
        """
        options = changed_precision(self.options, self.experts.formats, changes)
        system = make_system(options)
        if self.decode is not None and not system.decides_on_device:
            raise ConfigError(
                "vllm-dymoe: the precision stays as it was: the device decides about experts in decode, and this needs "
                'the host; start with decisions "host".'
            )
        self._take_decode_counts()  # of the bit-widths that they had
        plan = self._plan(self.plan.limit, options, system)
        if plan == self.plan and slot_bits(self.experts, options, system.tiers) == self.memory.bits:
            self._serve_with(options, system)
        else:
            self._replace("the precision", options, system, plan)

    def set_predictor(self, predictor: Predictor) -> None:
        """Foresee with another predictor, for the next step on.

        Where it takes other memory than the one before, the slots are shared out again and the cache starts empty.
        Decode steps without the host fetch nothing ahead any more: graphs hold the predictor of their capture.

        Raises:
            ConfigError: the budget has no room for it, or a read that was given up still has not ended; the old one
                goes on.
        """
        before = self.predictor
        self.predictor = Measured(predictor, before.stats if before else None)
        try:
            if before is None or before.nbytes != self.predictor.nbytes:
                plan = self._plan(self._limit(self.options), self.options, self.system)
                self._replace("the predictor", self.options, self.system, plan)
        except ConfigError:
            self.predictor = before
            raise
        self._fetch_nothing_in_graphs()

    def stop_foreseeing(self) -> None:
        """Nothing is named ahead from the next step on."""
        self.predictor = None
        self._fetch_nothing_in_graphs()

    @property
    def fetches_in_graphs(self) -> bool:
        """Whether decode steps without the host fetch ahead."""
        return isinstance(self.memory, DecidedMemory) and self.memory.most_ahead > 0

    def _fetch_nothing_in_graphs(self) -> None:
        """A captured graph goes on asking the predictor of its capture, and heeds it no more."""
        if isinstance(self.memory, DecidedMemory):
            self.memory.fetch_ahead(0)

    def _replace(self, what: str, options: Options, system: System, plan: SlotPlan) -> None:
        """Go on with other slots; if they cannot be had, with the old ones.

        Raises:
            ConfigError: a read that was given up still writes into a slot, so that ``what`` cannot change; or there is
                no memory.
        """
        if self._prefetcher is not None:
            self._prefetcher.clear()
        if self._migration is not None:
            self._migration.stop()
        if not self._fetcher.settle_all():
            raise ConfigError(
                f"vllm-dymoe: {what} cannot change while reads that were given up have not ended "
                f"({self.store.description}); try again later."
            )
        self.memory.check_growth(plan, slot_bits(self.experts, options, system.tiers))
        before = self.options, self.system, self.plan
        self.memory.free()
        try:
            self._allocate(options, system, plan)
        except ConfigError:
            self.memory.free()
            self._allocate(*before)
            raise

    @property
    def free_device_bytes(self) -> int:
        """Bytes of the device's memory that are free for anybody."""
        return self._device_memory.available()

    @property
    def minimum_budget(self) -> int:
        """The smallest feasible budget in bytes."""
        return minimum_budget(self.experts, self.options, self.system, self._beside_experts)

    @property
    def _beside_experts(self) -> int:
        """Bytes of the budget that are no slots: the kernel's workspace, predictor, and what a device decides by."""
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return self.kernel.workspace_bytes + predictor + (0 if self.decode is None else self.decode.nbytes)

    @property
    def plan(self) -> SlotPlan:
        """How the budget is spent."""
        return self.memory.plan

    @property
    def budget(self) -> BudgetTracker:
        """Counts every byte of the budget."""
        return self.memory.budget

    def _limit(self, options: Options) -> int:
        return limit_in_bytes(self._expert_budget, self.experts, options, self._beside_experts, self._automatic_budget)

    def _plan(self, limit: int, options: Options, system: System) -> SlotPlan:
        shares = system.all_shares(self.experts)
        filled = isinstance(self.memory, DecidedMemory)
        beside, popularity = self._beside_experts, self._popularity
        return plan_slots(self.experts, options, system, limit, beside, shares, filled=filled, popularity=popularity)

    def _serve_with(self, options: Options, system: System) -> None:
        self.options, self.system = options, system
        self._bits = {tier: tier_bits(options, tier) for tier in Tier}
        if isinstance(self.memory, DecidedMemory):
            self.memory.serve(system, self._bits)

    def _allocate(self, options: Options, system: System, plan: SlotPlan) -> None:
        """Serve with other slots; the old ones are gone, so that there is one arena at a time."""
        self.memory.allocate(plan, slot_bits(self.experts, options, system.tiers), reuse_high=system.reuses_high)
        self._serve_with(options, system)
        self.memory.fence(self.engine.fence())
        # Whose slots change between steps knows no last reader of theirs: steps without the host leave none.
        overlaps = system.overlaps and system.migrating is None
        self._fetcher = Fetcher(self.memory, self.engine, overlaps=overlaps)
        self._prefetcher = None if self.predictor is None else self._make_prefetcher()
        self._migration = self._make_migration()

    def _make_prefetcher(self) -> Prefetcher:
        layers = len(self.experts.layers) - self.experts.draft_layers
        return Prefetcher(self.memory, self._fetcher, self.engine, layers, self.system, self._prefetch_stats)

    def _make_migration(self) -> Migration | None:
        """None where steps fetch what they need: the system asks for that, or the budget cannot hold every expert."""
        migrating, held = self.system.migrating, sum(self.plan.quotas.get(Tier.HI, ()))
        if migrating is None or not held:
            return None
        decoded = DecodeCounts(self.memory.decisions) if isinstance(self.memory, PlannedMemory) else None
        return Migration(self.memory, self._fetcher, self.engine, migrating, self._popularity, self._agree, decoded)

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
        intervals = self._prefetcher.intervals if self._prefetcher else {}
        self._take_decode_counts()
        transfers, guesses = self.engine.stats, self._prefetch_stats
        counts, foreseen, moved = self._counts, self.predictor, self._migration
        return RuntimeStats.collect(counts, self.memory, transfers, guesses, intervals, foreseen, moved)

    def _take_decode_counts(self) -> None:
        if isinstance(self.memory, DecidedMemory):
            self.memory.take_counts(self._counts, self.engine.stats, self._prefetch_stats)

    def precision(self) -> dict[str, Any]:
        """What decides precision at the moment, and what it means for a single token, as JSON-serialisable data."""
        options, layers = self.options, len(self.experts.layers)
        shares = self.system.all_shares(self.experts)
        return {
            "system": self.system.name,
            "system_options": dict(options.system_options),
            "hi": options.hi,
            "lo": options.lo,
            "stored_bits": sorted(self.experts.formats, reverse=True),
            "share_of_tiers_in_decode": {tier.value: sum(shares[tier]) / layers for tier in Tier if tier in shares},
            "slots": {tier.value: count for tier, count in self.plan.slots.items()},
        }

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """For what was made up, often thousands of tokens all alike: nobody counts it, foresees or learns from it."""
        before = self._counts, self.engine.stats, self.predictor, self._migration
        self._counts, self.engine.stats, self.predictor = ResidencyCounts(), TransferStats(), None
        self._migration = None
        try:
            yield
        finally:
            self._counts, self.engine.stats, self.predictor, self._migration = before

    def reset_stats(self) -> None:
        """Count from zero."""
        self._take_decode_counts()
        self._counts, self.engine.stats = ResidencyCounts(), TransferStats()
        self._prefetch_stats.reset()
        if self._migration is not None:
            self._migration.reset_stats()
        if self.predictor is not None:
            self.predictor.stats, self.predictor.seconds = PredictionStats(), 0.0

    def release(self) -> HostStore:
        """End the transfer threads and give the slots' memory back; the store stays open, for a runtime after this."""
        self.engine.close()
        self.memory.free()
        return self.store

    def close(self) -> None:
        """End the transfer threads and close the store."""
        self.engine.close()
        self.store.close()

    def check_integrity(self) -> None:
        """Between steps: nothing pinned, no slot lost, the budget kept.

        Raises:
            AssertionError: it is not so.
        """
        self._fetcher.collect()
        waiting = [*self._fetcher.orphaned, *(self._prefetcher.ahead if self._prefetcher else ())]
        waiting += self._migration.flying if self._migration else ()
        self.memory.check_integrity((fetch.tier, fetch.slot, fetch.kept) for fetch in waiting)
