"""Prefetch on a CPU: reads predicted experts from disk.

They go into staging slots, while no step waits for the disk.

A prediction must cost nothing, correct or not:

- It uses a staging slot and evicts nothing, so predictions do not change what layers keep. A demand transfer that finds
  no free slot takes one back.
- It moves one projection at a time, and only while no demand transfer waits or runs.
- When its layer is routed, it is claimed, or cancelled at the next projection.
- While predictions do not pay, few are made, if the policy paces them (``prefetch.pace``).

Prefetch changes when an expert arrives, never what is computed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from vllm_dymoe.cache.counters import PrefetchStats
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.transfer import Reason
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.experts.format import EVERY_PROJECTION
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.policies import Policy
from vllm_dymoe.prefetch import Candidate, Measured
from vllm_dymoe.prefetch.pace import Pace


class Prefetcher:
    """Turns a predictor's candidates into transfers.

    A fetched expert is wasted if its step wants another precision, unless versions are nested.
    """

    def __init__(
        self,
        fetcher: Fetcher[DeviceCache],
        num_layers: int,
        policy: Policy,
        stats: PrefetchStats,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory, self._fetcher, self._engine = fetcher.cache, fetcher, fetcher.engine
        self._num_layers, self._policy, self.stats, self.clock = num_layers, policy, stats, clock
        self._candidates: deque[tuple[int, int, Precision]] = deque()  # layer, expert, and in which precision
        self._ahead: dict[int, list[Fetch]] = {}  # by layer, in the order of their transfers
        self._spent = 0.0  # host seconds of predictions since a layer last waited for the link
        self._waited = 0.0  # total seconds of exposed waits so far
        self._answered = False  # whether the last prediction named any expert
        # A prefill wants most experts of a layer and a single token few, so each phase has a pace of its own.
        prefetch = policy.prefetch
        self._projections = prefetch.projections if prefetch else len(EVERY_PROJECTION)
        self._paces = {phase: Pace(paid=prefetch is not None and prefetch.paced) for phase in Phase}
        self._pace = self._paces[Phase.DECODE]  # of the running step

    def look_ahead(self, layer: int, phase: Phase, predictor: Measured) -> None:
        """Request a prediction and offer its candidates, if the pace allows one now.

        If CPU cores carry out transfers there is no idle time, and no prediction is made.
        """
        self._pace = self._paces[phase]
        if not self._engine.occupies_cores and self._pace.acts():
            self._ask(layer, predictor)

    def predict_first_layer(self, phase: Phase, predictor: Measured) -> None:
        """Prefetch for the first MoE layer, at the start of a step.

        Nothing is done if the pace does not allow it now.
        """
        self._pace = self._paces[phase]
        if not self._engine.occupies_cores and self._pace.acts():
            self._ask(-1, predictor)
            self.fill()

    @property
    def frees_slots_early(self) -> bool:
        """Whether predictions wait for slots while layers keep none.

        Then one expert should be computed early, by itself.
        """
        return bool(self._candidates) and not self._policy.residency.keeps

    def offer(self, layer: int, candidates: Iterable[Candidate]) -> None:
        """Replace the candidates by experts of the layers after ``layer``, best first.

        Each has the precision that its own layer will want; candidates whose precision has no slots are dropped.
        """
        coming = [candidate for candidate in candidates if candidate.layer > layer]
        named: dict[int, list[int]] = {}
        for candidate in coming:
            named.setdefault(candidate.layer, []).append(candidate.expert)
        precisions = {
            later: self._policy.precision.precisions_ahead(later, self._num_layers, experts)
            for later, experts in named.items()
        }
        self._candidates = deque()
        for later, expert in coming:
            precision = precisions[later].get(expert)
            if precision is not None and precision in self._memory.pools:
                self._candidates.append((later, expert, precision))

    def fill(self) -> None:
        """Start transfers while there are free slots.

        The engine runs them when no demand waits.
        """
        if self._fetcher.orphaned:
            self._fetcher.collect()
        if self._candidates:
            begin = self.clock()
            self._take_slots()
            self._spend(self.clock() - begin)

    def _take_slots(self) -> None:
        while self._candidates:
            layer, expert, precision = self._candidates[0]
            ahead = self._ahead.setdefault(layer, [])
            for part in self._memory.lacking(layer, expert, precision):
                if any(f.expert == expert and (f.precision is part or not self._memory.nested) for f in ahead):
                    continue
                fetch = self._fetcher.start(layer, expert, part, Reason.PREFETCH, projections=self._projections)
                if fetch is None:
                    return
                ahead.append(fetch)
            self._candidates.popleft()

    def claim(self, layer: int, wanted: Mapping[int, Precision]) -> dict[tuple[int, Precision], Fetch]:
        """Return the fetches that a routed layer needs, and give up the others.

        Fetches that have not arrived become demand transfers. The caller releases all of them.

        Returns:
            the fetches, by expert and pool.
        """
        self._spend(0.0)
        self._pace.spend(self._spent, answered=self._answered)  # host time of predictions for the layer before
        self._spent, self._answered = 0.0, False
        self._candidates = deque(named for named in self._candidates if named[0] > layer)
        claimed = {}
        for fetch in self._ahead.pop(layer, ()):
            precision = wanted.get(fetch.expert)
            needed = precision is not None and fetch.precision in self._memory.parts[precision]
            self._pace.judge(needed, fetch.ticket.link_seconds(self.clock()))
            if not needed:
                self._give_up(fetch)
                continue
            claimed[fetch.expert, fetch.precision] = fetch
            in_time = fetch.ticket.state in (State.RESTING, State.DONE)
            self.stats.useful += in_time
            self.stats.late += not in_time
            if self._engine.arrived(fetch.ticket):
                self._fetcher.complete(fetch)
            else:
                self._engine.demand(fetch.ticket)
        return claimed

    def give_way(self, precision: Precision) -> bool:
        """Free a slot for a demand; return whether one is free at once.

        The latest prediction gives up its slot first.
        """
        if self._fetcher.collect():
            return True
        for fetches in (self._ahead[layer] for layer in sorted(self._ahead, reverse=True)):
            for fetch in [fetch for fetch in reversed(fetches) if fetch.precision is precision]:
                fetches.remove(fetch)
                if self._give_up(fetch):
                    return True
        return False

    def clear(self) -> None:
        self._candidates.clear()
        for fetches in self._ahead.values():
            self._fetcher.give_up(fetches, wait=True)  # an enqueued copy still writes, and its memory may be freed
        self._ahead.clear()

    def _ask(self, layer: int, predictor: Measured) -> None:
        begin = self.clock()
        self.offer(layer, predictor.predict(layer))
        self._answered = bool(self._candidates)
        self._spend(self.clock() - begin)

    def _spend(self, seconds: float) -> None:
        """Record host time spent on predictions.

        The time costs nothing if the layer waits for the link afterwards, because the link was working meanwhile.
        """
        waited = self._engine.stats.exposed_wait_seconds
        self._spent = seconds + (self._spent if waited <= self._waited else 0.0)
        self._waited = waited

    @property
    def intervals(self) -> dict[str, int]:
        """The interval of each phase: of how many predictions one is acted on."""
        return {phase.value: pace.interval for phase, pace in self._paces.items()}

    @property
    def ahead(self) -> list[Fetch]:
        return [fetch for fetches in self._ahead.values() for fetch in fetches]

    def _give_up(self, fetch: Fetch) -> bool:
        """Give up a prediction; return whether its slot is free already."""
        orphaned, ticket = len(self._fetcher.orphaned), fetch.ticket
        self._fetcher.give_up([fetch])
        free = len(self._fetcher.orphaned) == orphaned
        moved = ticket.arrived > 0 or not free
        self.stats.wasted += moved
        self.stats.cancelled += not moved
        return free
