"""Fetching ahead: what a predictor names goes into slots and link time that demand leaves idle.

A guess must cost nobody anything, right or wrong:

- It takes a staging slot and evicts nothing, so that what layers keep does not depend on guesses. A demand transfer
  that finds no slot takes one back.
- It moves one projection at a time, and only while no demand transfer waits or runs.
- When its layer is routed it is claimed, or given up at the next projection.
- While guesses do not pay, few are made: ``throttle``.

It can change only when an expert arrives, never what is computed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from vllm_dymoe.experts.cache import ExpertCache
from vllm_dymoe.experts.handles import Version
from vllm_dymoe.experts.routing import Phase
from vllm_dymoe.experts.store import BlobKey
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.predict import Candidate, Measured
from vllm_dymoe.runtime.throttle import Throttle
from vllm_dymoe.transfer import Reason, TransferEngine
from vllm_dymoe.transfer.ticket import State


@dataclass
class PrefetchStats:
    """What became of guesses.

    Attributes:
        useful: needed, and there in time as far as they were asked for.
        late: needed while they were on their way.
        wasted: not needed, after bytes had moved.
        cancelled: not needed, or given up for demand, before any byte moved.
    """

    useful: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.useful = self.late = self.wasted = self.cancelled = 0


@dataclass
class Prefetcher:
    """Turns candidates into transfers.

    Attributes:
        cache: gives slots.
        engine: moves bytes.
        tier: which version is fetched; a step that wants another one has no use for it.
        bits: of the tier.
        projections: how many of an expert's three projections are fetched ahead (FIRM-MoE's granularity n).
        stats: counts to go on with.
        clock: seconds, as ``time.perf_counter``.
    """

    cache: ExpertCache
    engine: TransferEngine
    tier: Tier
    bits: int
    projections: int
    stats: PrefetchStats
    clock: Callable[[], float] = time.perf_counter
    _candidates: deque[Candidate] = field(default_factory=deque)
    _ahead: dict[int, list[Version]] = field(default_factory=dict)  # by layer, in the order of their transfers
    _leaving: list[Version] = field(default_factory=list)  # given up while a projection was moving

    def __post_init__(self) -> None:
        # A prefill wants most experts of a layer and a single token few: what pays for one may not for the other.
        self.throttles = {phase: Throttle() for phase in Phase}
        self._throttle = self.throttles[Phase.DECODE]  # of the running step

    def look_ahead(self, layer: int, phase: Phase, predictor: Measured) -> Callable[[], None] | None:
        """Ask for a prediction and offer what it names, if this is one to act on.

        Cores that compute have no idle link time, so nothing is asked for where transfers take them.

        Returns:
            What is left to do once experts are computing, where the predictor computes beside them.
        """
        self._throttle = self.throttles[phase]
        if self.engine.occupies_cores or not self._throttle.acts():
            return None
        if not predictor.answers_later:
            self._ask(layer, predictor)
            return None
        begin = self.clock()
        predictor.begin(layer)
        self._throttle.spend(self.clock() - begin)
        return partial(self._ask, layer, predictor)

    def offer(self, layer: int, candidates: Iterable[Candidate]) -> None:
        """Consider experts of the layers after ``layer``, best first, in place of those that were offered before."""
        self._candidates = deque(candidate for candidate in candidates if candidate.layer > layer)

    def fill(self) -> None:
        """Start transfers as far as there are slots; the engine moves them when nothing else is to be moved."""
        if self._leaving:
            self._collect()
        if self._candidates:
            begin = self.clock()
            self._fill()
            self._throttle.spend(self.clock() - begin)

    def _fill(self) -> None:
        while self._candidates:
            layer, expert, _ = self._candidates[0]
            if self.cache.handles.get(layer, expert) is None:
                version = self.cache.acquire_ahead(layer, expert, self.tier)
                if version is None:
                    return
                key, slot = BlobKey(layer, expert, self.bits), version.slot
                version.ticket = self.engine.submit(
                    key, slot.blob, Reason.PREFETCH, slot.last_read, projections=self.projections
                )
                self._ahead.setdefault(layer, []).append(version)
            self._candidates.popleft()

    def claim(self, layer: int, wanted: Mapping[int, Tier]) -> list[Version]:
        """A layer is routed: hand over what it needs, pinned, and give up the rest.

        What is complete is published, everything else is in demand from now on.
        """
        self._candidates = deque(candidate for candidate in self._candidates if candidate.layer > layer)
        claimed = []
        for version in self._ahead.pop(layer, ()):
            needed = wanted.get(version.expert) is version.tier
            self._throttle.judge(needed, version.ticket.link_seconds(self.clock()))
            if not needed:
                self._give_up(version)
                continue
            claimed.append(version)
            in_time = version.ticket.state in (State.RESTING, State.DONE)
            self.stats.useful += in_time
            self.stats.late += not in_time
            if self.engine.arrived(version.ticket):
                self.engine.wait(version.ticket)
                self.cache.publish(version)
            else:
                self.engine.demand(version.ticket)
        return claimed

    def give_way(self, tier: Tier) -> bool:
        """Free a slot for demand, if one can be freed at once: that of the guess that was made last."""
        if tier is not self.tier:
            return False
        if self._collect():
            return True
        while self._ahead:
            layer, versions = max(self._ahead.items())
            version = versions.pop()
            if not versions:
                del self._ahead[layer]
            if self._give_up(version):
                return True
        return False

    def settle(self) -> bool:
        """Wait for a slot of what was given up; False if there is none, or its read does not end."""
        for version in self._leaving:
            if self.engine.settle(version.ticket):
                return self._collect()
        return False

    def clear(self) -> bool:
        """Give up everything; whether all slots came back."""
        self._candidates.clear()
        for layer in list(self._ahead):
            for version in self._ahead.pop(layer):
                self._give_up(version)
        while self.settle():
            pass
        return not self._leaving

    def _ask(self, layer: int, predictor: Measured) -> None:
        begin = self.clock()
        self.offer(layer, predictor.predict(layer))
        if self._candidates:
            self._throttle.answer(self.clock() - begin)

    @property
    def intervals(self) -> dict[str, int]:
        """One of so many predictions is acted on, by phase."""
        return {phase.value: throttle.interval for phase, throttle in self.throttles.items()}

    @property
    def fetched_ahead(self) -> int:
        """Experts that are pinned for layers that have not been routed yet."""
        return sum(map(len, self._ahead.values()))

    def _give_up(self, version: Version) -> bool:
        """Have no more use for a version; whether its slot is free already."""
        free = self.engine.cancel(version.ticket) or version.ticket.ended
        moved = version.ticket.arrived > 0 or not free
        self.stats.wasted += moved
        self.stats.cancelled += not moved
        self.cache.abandon(version)
        if free:
            self.cache.release(version)
        else:
            self._leaving.append(version)
        return free

    def _collect(self) -> bool:
        """Take back the slots of what was given up and does not move any more; whether there were any."""
        left = [version for version in self._leaving if not version.ticket.ended]
        free = len(left) < len(self._leaving)
        for version in self._leaving:
            if version.ticket.ended:
                self.cache.release(version)
        self._leaving = left
        return free
