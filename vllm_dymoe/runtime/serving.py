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

import numpy as np
import torch

from vllm_dymoe.kernels import Activation, ExpertKernel, combine
from vllm_dymoe.observe.timeline import Lane
from vllm_dymoe.predict import Measured, PredictionStats
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.routing import Phase, Routing
from vllm_dymoe.residency.rule import HIT
from vllm_dymoe.residency.slots import Slot
from vllm_dymoe.residency.table import CODES
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.counters import ResidencyCounts
from vllm_dymoe.runtime.decode_path import DecodePath
from vllm_dymoe.runtime.fetcher import Fetch, Fetcher
from vllm_dymoe.runtime.memory import ExpertMemory, Writer
from vllm_dymoe.runtime.migration import Migration
from vllm_dymoe.runtime.prefetch import Prefetcher, PrefetchStats
from vllm_dymoe.runtime.stream import LayerStep
from vllm_dymoe.systems import System
from vllm_dymoe.transfer import TransferEngine, TransferStats


class Serving:
    """The steps of which the host decides, and what they are served with.

    Args:
        memory: who is where.
        kernel: computes.
        engine: brings what is missing.
        predictor: names experts to fetch ahead; None for none.
        decode: serves the steps of which the device decides; None where there are none.

    Attributes:
        system: chooses tiers.
        fetcher: gives slots to what is fetched.
        prefetcher: fetches ahead; None without a predictor.
        migration: moves versions between steps; None where steps fetch what they need.
        counts: of what steps needed.
        prefetch_stats: of what was fetched ahead.
    """

    system: System
    fetcher: Fetcher
    prefetcher: Prefetcher | None = None
    migration: Migration | None = None

    def __init__(
        self,
        memory: ExpertMemory,
        kernel: ExpertKernel,
        engine: TransferEngine,
        predictor: Measured | None,
        decode: DecodePath | None,
    ) -> None:
        self.memory, self.kernel, self.engine = memory, kernel, engine
        self.predictor, self._decode = predictor, decode
        self.counts, self.prefetch_stats = ResidencyCounts(), PrefetchStats()
        self._bits: Mapping[Tier, int] = {}

    def choose_with(self, system: System, bits: Mapping[Tier, int]) -> None:
        """Another system, or other values of it, from the next step on.

        Args:
            system: chooses tiers.
            bits: of each tier, 0 for one that is skipped.
        """
        self.system, self._bits = system, bits

    def begin(self) -> None:
        """With the slots that ``memory`` has now."""
        self.memory.pools.fence(self.engine.fence())
        # Whose slots change between steps knows no last reader of theirs: steps without the host leave none.
        overlaps = self.system.residency.overlaps and self.system.residency.migrating is None
        self.fetcher = Fetcher(self.memory, self.engine, overlaps=overlaps)
        self.prefetcher = None if self.predictor is None else self._make_prefetcher()
        self.migration = None

    def end(self) -> bool:
        """Stop what goes on between steps, before slots are taken away.

        Returns:
            Whether every read has ended.
        """
        if self.migration is not None:
            self.migration.stop()
        return self.settle()

    def settle(self) -> bool:
        """Wait for what is on its way, and keep nothing of what was fetched ahead.

        Returns:
            Whether every read has ended.
        """
        if self.prefetcher is not None:
            self.prefetcher.clear()
        return self.fetcher.settle_all()

    def _make_prefetcher(self) -> Prefetcher:
        experts = self.memory.experts
        layers = len(experts.layers) - experts.draft_layers
        return Prefetcher(self.memory, self.fetcher, self.engine, layers, self.system, self.prefetch_stats)

    def begin_step(self, phase: Phase) -> None:
        """A step of requests begins, and its first MoE layer is some way off.

        Args:
            phase: of the step.
        """
        if self.migration is not None:
            self.migration.turn()
        foresight = self.system.foresight
        asked = phase is Phase.PREFILL and foresight is not None and foresight.first_layer
        if asked and self.predictor is not None and self.prefetcher is not None:
            self.prefetcher.foresee_first_layer(phase, self.predictor)

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
            layer, (x, weights) = routing.layer, routing.inputs()
            tokens, top_k = routing.ids.shape
            tiers, bits = self.system.precision.select(routing), self._bits
            wanted = {expert: tier for expert in routing.active if bits[tier := tiers[expert]] > 0}
            planned = self.counts.planned
            planned.update(wanted.values())
            planned[Tier.SKIP] += len(tiers) - len(wanted)
            active = np.fromiter(wanted, np.int64, len(wanted))
            codes = np.fromiter(map(CODES.__getitem__, wanted.values()), np.int8, len(wanted))
            if self.fetcher.orphaned:
                self.fetcher.collect()
            if self.migration is not None:
                uses = np.fromiter(map(routing.counts.__getitem__, wanted), np.int64, len(wanted))
                self.migration.count(layer, active, uses)
            places = self.memory.begin_step(layer, active, codes)
            out = x.new_empty((tokens * top_k, x.shape[1]))

            def begin(order: Sequence[int]) -> Decision:
                decision = Decision.of_routing(routing.grouped, order, row_for_each_pair=routing.weights_on_input)
                self.kernel.begin(x, decision, out, activation)
                return decision

            look_ahead = None
            if self.predictor is not None and layer < routing.num_layers:  # nobody foresees a draft's layers
                look_ahead = partial(self._look_ahead, self.predictor, routing)
            if timeline is None and (places == HIT).all():  # a timeline shows computation piece by piece
                self._run_residents(layer, wanted, begin, look_ahead)
            else:
                step = LayerStep(
                    layer,
                    wanted,
                    places.T.tolist(),
                    self.memory,
                    self.fetcher,
                    self.engine,
                    self.prefetcher,
                    self.counts,
                    kernel=self.kernel,
                    in_turn=self.engine.occupies_cores or not self.system.residency.overlaps,
                )
                step.run(begin, look_ahead)
            if sum(map(routing.counts.__getitem__, wanted)) == tokens * top_k:
                return combine(out, weights)
            skipped = tiers.keys() - wanted.keys()
            return combine(out, weights, routing.ids, skipped, renormalize=self.system.precision.renormalizes)
        finally:  # whether it could be computed or not
            if timeline is not None:
                ended, what = time.perf_counter(), f"layer {routing.layer}"
                timeline.add(Lane.HOST, what, "layer", begun, ended, tokens=len(routing.ids), phase=routing.phase.value)

    def _run_residents(
        self,
        layer: int,
        wanted: Mapping[int, Tier],
        begin: Callable[[Sequence[int]], Decision],
        look_ahead: Callable[[], Callable[[], None] | None] | None,
    ) -> None:
        """A layer whose experts are all there is computed at once, with nothing to wait for."""
        prefetcher, counts = self.prefetcher, self.counts
        if prefetcher is not None:
            prefetcher.claim(layer, {})
        act = None if look_ahead is None else look_ahead()
        order = list(wanted)
        decision = begin(order)
        slots: list[Slot] = []
        for item, (expert, tier) in enumerate(wanted.items()):
            held, parts = self.memory.resident(layer, expert, tier)
            counts.reuses += held is not tier
            slots += parts
            decision.place(item, self.memory.packed(parts))
        counts.hits += len(order)
        if order:
            self.kernel.compute(range(len(order)))
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
        act = None if self.prefetcher is None else self.prefetcher.look_ahead(routing.layer, routing.phase, predictor)
        timeline = self.engine.timeline
        if timeline is not None:
            timeline.add(Lane.HOST, f"predict after layer {routing.layer}", "predict", begin, time.perf_counter())
        return act

    # -- whose steps run --------------------------------------------------------------------------

    def enter_decode(self) -> None:
        """Steps without the host begin: nothing of the host's may still write into a slot."""
        if self.memory.enter_decode():
            ended = self.settle()
            assert ended, "a copy from host memory has not ended"

    @property
    def counts_decoded(self) -> bool:
        """Whether ``end_decode`` needs what routers chose."""
        return self.migration is not None

    def end_decode(self, tokens: int) -> None:
        """A step of requests without the host has run, or will before anything else."""
        if self.migration is not None:
            self.migration.count_decoded(tokens)

    def _enter_stream(self) -> None:
        memory = self.memory
        if memory.writer is Writer.DEVICE and not memory.streaming:
            assert self._decode is not None
            self._decode.settle()
            memory.enter_stream(self.engine.fence())

    # -- what nobody is to count -------------------------------------------------------------------

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """For what was made up, often thousands of tokens all alike: nobody counts it, foresees or learns from it."""
        before = self.counts, self.engine.stats, self.predictor, self.migration
        self.counts, self.engine.stats, self.predictor = ResidencyCounts(), TransferStats(), None
        self.migration = None
        try:
            yield
        finally:
            self.counts, self.engine.stats, self.predictor, self.migration = before

    def reset_stats(self) -> None:
        """Count from zero."""
        self.counts, self.engine.stats = ResidencyCounts(), TransferStats()
        self.prefetch_stats.reset()
        if self.migration is not None:
            self.migration.reset_stats()
        if self.predictor is not None:
            self.predictor.stats, self.predictor.seconds = PredictionStats(), 0.0

    def on_their_way(self) -> Iterator[Fetch]:
        """Fetches that nobody has waited for so far."""
        yield from self.fetcher.orphaned
        if self.prefetcher is not None:
            yield from self.prefetcher.ahead
        if self.migration is not None:
            yield from self.migration.flying
