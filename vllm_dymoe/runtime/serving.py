"""The forward of one MoE layer in a step that the host decides: tiers, rule, compute, combine. Results are added in the
router's order at the end, so that neither what is on the device nor any timing changes a bit (invariant 1)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from vllm_dymoe.kernels import Activation, ExpertKernel, combine
from vllm_dymoe.predict import Measured, PredictionStats
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.format import Expert
from vllm_dymoe.residency.routing import Phase, Routing
from vllm_dymoe.residency.rule import HIT, THERE, Ints, fates_of
from vllm_dymoe.residency.slots import Slot
from vllm_dymoe.residency.table import CODES
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.counters import PrefetchStats, ResidencyCounts
from vllm_dymoe.runtime.fetcher import Fetch, Fetcher
from vllm_dymoe.runtime.levels import ReadAhead, expect
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.migration import Migration
from vllm_dymoe.runtime.prefetch import Prefetcher
from vllm_dymoe.runtime.stream import LayerStep
from vllm_dymoe.runtime.there import Beside
from vllm_dymoe.store.disk import DiskCounts
from vllm_dymoe.systems import System
from vllm_dymoe.transfer import HostLevel, TransferEngine, TransferError, TransferStats

_FAR = 1 << 40  # rows of an expert that is never computed where it lies


class Serving:
    """The steps that the host decides, and what they are served with; nothing is foreseen beside a device that does."""

    system: System  # chooses tiers
    bits: Mapping[Tier, int]  # of each tier, 0 for one that is skipped
    computes_there: bool  # some experts without a slot are computed in host memory, as the table's costs say
    beside: Beside | None = None  # cores that do it while a device computes; None where the device is the host
    records_fates = False  # routings are told what becomes of their experts
    fetcher: Fetcher  # gives slots to what is fetched
    prefetcher: Prefetcher | None = None  # fetches ahead; None without a predictor
    migration: Migration | None = None  # moves versions between steps; None where steps fetch what they need

    def __init__(
        self,
        memory: ExpertMemory,
        kernel: ExpertKernel,
        engine: TransferEngine,
        predictor: Measured | None,
        level: HostLevel | None = None,
    ) -> None:
        self.level, self.disk = level, DiskCounts()  # host memory over a disk, if it is; what was read from files
        self.memory, self.kernel, self.engine = memory, kernel, engine
        self.predictor = predictor
        self.counts, self.prefetch_stats = ResidencyCounts(), PrefetchStats()

    # -- between steps ----------------------------------------------------------------------------

    def begin(self) -> None:
        """With the slots that ``memory`` has now."""
        self.memory.pools.fence(self.engine.fence())
        # Systems that move slots between steps have no last-reader fence, so their copies wait for all computation.
        overlaps = self.system.residency.overlaps and self.system.residency.migrating is None
        self.fetcher, self.prefetcher = Fetcher(self.memory, self.engine, overlaps=overlaps), None
        self.migration = None
        if self.predictor is not None:
            self.predictor.predictor.slots_changed()
            experts = self.memory.experts
            layers = len(experts.layers) - experts.draft_layers
            ahead = ReadAhead(self.level, self.memory, layers) if self.level else None
            self.prefetcher = Prefetcher(self.fetcher, layers, self.system, self.prefetch_stats, ahead)

    def end(self) -> bool:
        """Stop what goes on between steps, before slots are taken away; whether every read has ended."""
        if self.migration is not None:
            self.migration.stop()
        return self.settle()

    def settle(self) -> bool:
        """Wait for what is on its way, and keep nothing of what was fetched ahead; whether every read has ended."""
        if self.prefetcher is not None:
            self.prefetcher.clear()
        return self.fetcher.settle_all()

    def begin_step(self, phase: Phase) -> None:
        """A step of requests begins, and its first MoE layer is some way off."""
        if self.migration is not None:
            self.migration.turn()
        foresight = self.system.foresight
        asked = phase is Phase.PREFILL and foresight is not None and foresight.first_layer
        if asked and self.predictor is not None and self.prefetcher is not None:
            self.prefetcher.foresee_first_layer(phase, self.predictor)

    def end_decode(self, tokens: int, *, wide: bool = False) -> None:
        """A step of requests without the host has run, or will before anything else."""
        if self.migration is not None:
            self.migration.count_decoded(tokens, wide=wide)

    # -- in a step --------------------------------------------------------------------------------

    def forward(self, routing: Routing, activation: Activation = Activation.SILU) -> torch.Tensor:
        """Run one MoE layer: [tokens, hidden], the weighted sum over each token's experts on this rank. TransferError
        if an expert could not be fetched; the runtime can serve the next step."""
        if len(routing.ids) == 0:
            return torch.empty_like(routing.x)
        wanted, skipped, places = self._decide(routing)
        x, weights = routing.inputs()
        out = x.new_empty((routing.ids.numel(), x.shape[1]))
        look_ahead = None
        if self.predictor is not None and routing.layer < routing.num_layers:  # a draft's layers are not foreseen
            look_ahead = partial(self._look_ahead, routing)
        there = self._there(routing.layer, wanted, places)
        here = {expert: tier for expert, tier in wanted.items() if expert not in there} if there else wanted
        self.counts.there += len(there)
        self.counts.misses += len(there)
        answer = None
        if there and self.beside is not None:
            answer = self.beside.begin(routing, x, out, activation, there)
        own = {} if answer else there
        found = places[:, (places != THERE).all(0)]
        if not (found == HIT).all():
            in_turn = self.engine.occupies_cores or not self.system.residency.overlaps
            kernel, counts = self.kernel, self.counts
            grain: dict[str, bool] = {"in_turn": in_turn, "whole": self.system.residency.whole}
            step = LayerStep(routing.layer, self.fetcher, self.prefetcher, kernel, counts, **grain)
            step.acquire(here, found.T.tolist())
            step.run(partial(self._begin, routing, x, out, activation), look_ahead)
            self._compute(routing, x, out, activation, {}, own)
        else:
            self.counts.hits += len(here)
            if self.prefetcher is not None:
                self.prefetcher.claim(routing.layer, {})
            if look_ahead is not None:
                look_ahead()
            self._compute(routing, x, out, activation, here, own)
            if self.prefetcher is not None:
                self.prefetcher.answer()
                self.prefetcher.fill()
        if answer is not None:
            answer()
        elif there and (sentence := self.memory.lost(routing.layer, wanted, there)):
            raise TransferError(sentence)
        if not skipped and sum(map(routing.counts.__getitem__, wanted)) == len(out):
            return combine(out, weights)
        return combine(out, weights, routing.ids, skipped, renormalize=self.system.precision.renormalizes)

    def _decide(self, routing: Routing) -> tuple[dict[int, Tier], set[int], Ints]:
        """The tier of each expert that is computed, those that are skipped, and what the rule makes of the former."""
        bits, layer = self.bits, routing.layer
        tiers = self.system.precision.select(routing)
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
            self.migration.count(routing, active, uses)
        rows = None
        if self.computes_there and (self.beside is None or not self.beside.failed):
            rows = np.fromiter(map(routing.counts.__getitem__, wanted), np.int64, len(wanted))
            if not self.memory.store.whole:
                rows[self.memory.far(layer, wanted)] = _FAR
        places = self.memory.table.begin_step(layer, active, codes, rows, ages=self.system.residency.ages)
        if self.records_fates:
            held = self.memory.table.tier[layer]
            routing.fates = torch.from_numpy(fates_of(routing.host_ids, active, codes, held, places))
        if self.level is not None:
            expect(self.level, self.memory, layer, wanted, places)
        return wanted, tiers.keys() - wanted.keys(), places

    def _there(self, layer: int, wanted: Mapping[int, Tier], places: Ints) -> dict[int, Expert]:
        """What is computed where it lies."""
        memory, there = self.memory, {}
        if self.computes_there:
            far = (places == THERE).any(0).tolist()
            there = {expert: tier for (expert, tier), lies in zip(wanted.items(), far, strict=True) if lies}
        parts = {tier: tuple(memory.bits[part] for part in memory.parts[tier]) for tier in set(there.values())}
        return {expert: memory.in_store(layer, expert, parts[tier]) for expert, tier in there.items()}

    def _begin(
        self, routing: Routing, x: torch.Tensor, out: torch.Tensor, activation: Activation, order: Sequence[int]
    ) -> Decision:
        decision = Decision.of_routing(routing.grouped, order, row_for_each_pair=routing.weights_on_input)
        self.kernel.begin(x, decision, out, activation)
        return decision

    def _compute(
        self, routing: Routing, x: torch.Tensor, out: torch.Tensor, activation: Activation,
        here: Mapping[int, Tier], own: Mapping[int, Expert],
    ) -> None:  # fmt: skip
        """In one call, what needs no transfer: experts in slots, and of a CPU those in the store."""
        if not here and not own:
            return
        memory, slots, order = self.memory, list[Slot](), sorted([*here, *own]) if own else list(here)
        decision = self._begin(routing, x, out, activation, order)
        for item, expert in enumerate(order):
            if expert in own:
                decision.place(item, own[expert])
                continue
            held, parts = memory.resident(routing.layer, expert, here[expert])
            self.counts.reuses += held is not here[expert]
            slots += parts
            decision.place(item, memory.packed(parts))
        self.kernel.compute(range(len(order)))
        if self.kernel.asynchronous:
            last_read = self.engine.fence()
            for slot in slots:
                slot.last_read = last_read

    def _look_ahead(self, routing: Routing) -> None:
        """Tell the predictor what the router decided, and the prefetcher what the predictor makes of it."""
        predictor = self.predictor
        assert predictor is not None
        predictor.observe(routing)
        if self.prefetcher is not None:
            self.prefetcher.look_ahead(routing.layer, routing.phase, predictor)

    # -- counts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """For made-up tokens, often thousands all alike: they are not counted, foreseen or learnt from."""
        before, disk = (self.counts, self.engine.stats, self.predictor, self.migration), self.disk
        read = disk.reads, disk.nbytes, disk.seconds
        self.counts, self.engine.stats, self.predictor = ResidencyCounts(), TransferStats(), None
        self.migration = None
        try:
            yield
        finally:
            self.counts, self.engine.stats, self.predictor, self.migration = before
            disk.reset(read)

    def reset_stats(self) -> None:
        self.counts, self.engine.stats = ResidencyCounts(), TransferStats()
        self.prefetch_stats.reset()
        if self.migration is not None:
            self.migration.reset_stats()
        if self.predictor is not None:
            self.predictor.stats, self.predictor.seconds = PredictionStats(), 0.0
        self.disk.reset()
        if self.level is not None:
            self.level.reset_stats()

    def on_their_way(self) -> Iterator[Fetch]:
        """Fetches that no step has waited for so far."""
        yield from self.fetcher.orphaned
        if self.prefetcher is not None:
            yield from self.prefetcher.ahead
        if self.migration is not None:
            yield from self.migration.flying
