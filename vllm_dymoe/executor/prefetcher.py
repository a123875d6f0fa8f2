"""Fetching ahead: what a predictor names goes into slots and link time that demand leaves idle.

A prediction must cost nothing, right or wrong:

- It takes a staging slot and evicts nothing, so that what layers keep does not depend on predictions. A demand transfer
  that finds no slot takes one back.
- It moves one projection at a time, and only while no demand transfer waits or runs.
- When its layer is routed it is claimed, or given up at the next projection.
- While predictions do not pay, few are made, where the policy paces them (``prefetch.pace``).
- Where host memory is a cache, what is not in it is first read from the disk, for more layers than the link fetches
  for; and for the layers behind these, what the last step used in them.

It can change only when an expert arrives, never what is computed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from vllm_dymoe.cache.counters import PrefetchStats
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.transfer import Reason
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.executor.read_ahead import ReadAhead
from vllm_dymoe.experts.format import EVERY_PROJECTION
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.policies import Policy
from vllm_dymoe.prefetch import Candidate, Measured
from vllm_dymoe.prefetch.pace import Pace


class Prefetcher:
    """Turns candidates into transfers; with a level of host memory it is also read ahead into that from the disk. A
    step that wants an expert in another precision than was fetched has no use for it, unless one lies inside the
    other."""

    def __init__(
        self,
        fetcher: Fetcher[DeviceCache],
        num_layers: int,
        policy: Policy,
        stats: PrefetchStats,
        disk: ReadAhead | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory, self._fetcher, self._engine = fetcher.cache, fetcher, fetcher.engine
        self._num_layers, self._policy, self.stats, self.clock = num_layers, policy, stats, clock
        self._disk = disk
        self._candidates: deque[tuple[int, int, Precision]] = deque()  # layer, expert, and in which precision
        self._ahead: dict[int, list[Fetch]] = {}  # by layer, in the order of their transfers
        self._spent = 0.0  # seconds of the host since the layer last waited for the link
        self._waited = 0.0  # seconds of exposed waits until the last of these
        self._answered = False  # whether the last prediction named any expert
        self._asked: tuple[int, Measured] | None = None
        # A prefill wants most experts of a layer and a single token few: what pays for one may not for the other.
        prefetch = policy.prefetch
        self._projections = prefetch.projections if prefetch else len(EVERY_PROJECTION)
        self._paces = {phase: Pace(paid=prefetch is not None and prefetch.paced) for phase in Phase}
        self._pace = self._paces[Phase.DECODE]  # of the running step

    def look_ahead(self, layer: int, phase: Phase, predictor: Measured) -> None:
        """Ask for a prediction and offer what it names, if this is one to act on.

        Cores that compute have no idle link time, so nothing is asked for where transfers take them. Where the
        predictor computes on a side stream its answer is taken by :meth:`answer`, once experts are computing.
        """
        self._pace = self._paces[phase]
        if self._engine.occupies_cores or not self._pace.acts():
            return
        if predictor.answers_later:
            begin = self.clock()
            predictor.begin(layer)
            self._spend(self.clock() - begin)
            self._asked = layer, predictor
        else:
            self._ask(layer, predictor)

    def answer(self) -> None:
        """Offer what a predictor on a side stream has been asked for, if one has."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._ask(*asked)

    def predict_first_layer(self, phase: Phase, predictor: Measured) -> None:
        """A step begins: fetch for its first MoE layer what is most often wanted there, if this is one to act on."""
        self._pace = self._paces[phase]
        if not self._engine.occupies_cores and self._pace.acts():
            self._ask(-1, predictor)
            self.fill()

    @property
    def frees_slots_early(self) -> bool:
        """Whether predictions wait for slots of a layer that keeps none: its first expert is then computed by
        itself."""
        return bool(self._candidates) and not self._policy.residency.keeps

    def offer(self, layer: int, candidates: Iterable[Candidate]) -> None:
        """Consider experts of the layers after ``layer``, best first, in place of those that were offered before.

        Each is wanted in the precision that its own layer will want it in; in one that has no slots, it is not wanted.
        """
        coming = [candidate for candidate in candidates if candidate.layer > layer]
        named: dict[int, list[int]] = {}
        for candidate in coming:
            named.setdefault(candidate.layer, []).append(candidate.expert)
        precisions = {
            later: self._policy.precision.precisions_ahead(later, self._num_layers, experts)
            for later, experts in named.items()
        }
        wanted = ((later, expert, precisions[later][expert]) for later, expert in coming)
        self._candidates = deque(one for one in wanted if one[2] in self._memory.pools)
        if self._disk is not None:
            self._disk.offer(layer, list(self._candidates))

    def fill(self) -> None:
        """Start transfers as far as there are slots; the engine moves them when nothing else is to be moved."""
        if self._fetcher.orphaned:
            self._fetcher.collect()
        if self._candidates:
            begin = self.clock()
            self._take_slots()
            self._spend(self.clock() - begin)

    def _take_slots(self) -> None:
        while self._candidates:
            layer, expert, precision = self._candidates[0]
            if self._disk is not None and not self._disk.has(self._candidates[0]):
                self._candidates.popleft()  # a prediction of the link's waits for no disk
                continue
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
        """A layer is routed: hand over what it needs, by expert and pool, and give up the rest. What is complete is
        there, everything else is in demand from now on; the caller releases it."""
        self._spend(0.0)
        self._pace.spend(self._spent, answered=self._answered)  # what predictions have cost the layer before
        self._spent, self._answered, self._asked = 0.0, False, None
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
        """Free a slot for demand, if one can be freed at once: that of the prediction that was made last."""
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
            self._fetcher.give_up(fetches, wait=True)  # a copy that is enqueued still writes, and memory may go back
        self._ahead.clear()

    def _ask(self, layer: int, predictor: Measured) -> None:
        begin = self.clock()
        self.offer(layer, predictor.predict(layer))
        self._answered = bool(self._candidates)
        self._spend(self.clock() - begin)

    def _spend(self, seconds: float) -> None:
        """Record host time that predictions have taken.

        It is free if the layer waits for the link afterwards: the link works meanwhile, and what the layer would have
        waited for without a prediction it waits for less long.
        """
        waited = self._engine.stats.exposed_wait_seconds
        self._spent = seconds + (self._spent if waited <= self._waited else 0.0)
        self._waited = waited

    @property
    def intervals(self) -> dict[str, int]:
        """One of so many predictions is acted on, by phase."""
        return {phase.value: pace.interval for phase, pace in self._paces.items()}

    @property
    def ahead(self) -> list[Fetch]:
        return [fetch for fetches in self._ahead.values() for fetch in fetches]

    def _give_up(self, fetch: Fetch) -> bool:
        """Have no more use for a prediction; whether its slot is free already."""
        orphaned, ticket = len(self._fetcher.orphaned), fetch.ticket
        self._fetcher.give_up([fetch])
        free = len(self._fetcher.orphaned) == orphaned
        moved = ticket.arrived > 0 or not free
        self.stats.wasted += moved
        self.stats.cancelled += not moved
        return free
