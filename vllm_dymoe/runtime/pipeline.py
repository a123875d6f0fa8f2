"""One layer's experts through the slots: residents first, the others as they arrive, the next layer's behind them.

The schedule of DuoServe-MoE 5.2: each expert is fetched once, the link starts before
anything is computed, and one slot computes while others fill, so that a few slots
serve any number of experts. Its grain is FIRM-MoE's: an expert is computed projection
by projection as they arrive. While slots are short, an expert that frees one goes
first, because the link must not wait for computation; otherwise all that is there is
computed together, which costs the host least. Where computing only enqueues (a GPU),
each call is a launch that the host pays for and a few tokens hardly fill: there half
of what is on its way is computed in one, while the other half keeps the link busy.

Where the "device" is host memory and a transfer is a copy by the cores that compute,
there is nothing to overlap: threads that compete for a core cost both far more. Then
the two take turns.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from vllm_dymoe.experts.cache import ExpertCache
from vllm_dymoe.experts.handles import Version
from vllm_dymoe.experts.store import BlobKey
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.kernels import Activation, ExpertKernel, Groups, LayerWork
from vllm_dymoe.kernels.base import Receive
from vllm_dymoe.runtime.prefetch import Prefetcher
from vllm_dymoe.transfer import Lane, Reason, Timeline, TransferEngine, TransferError

LookAhead = Callable[[], Callable[[], None] | None]
"""Foresees; returns what is left to do of it once the first experts compute (DuoServe-MoE 5.3), or None."""


class Pipeline:
    """Runs layers, one at a time.

    Args:
        cache: who is where.
        engine: moves bytes.
        kernel: computes.
        bits: of each tier.
        store: where the bytes come from, for people.
        prefetcher: fetches ahead; None for nobody.
    """

    def __init__(
        self,
        cache: ExpertCache,
        engine: TransferEngine,
        kernel: ExpertKernel,
        bits: Mapping[Tier, int],
        store: str,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.cache = cache
        self.engine = engine
        self.kernel = kernel
        self.bits = bits
        self.store = store
        self.prefetcher = prefetcher
        self.late: list[Version] = []  # whose reads nobody waits for any more, and that still may be written

    def run(
        self,
        layer: int,
        wanted: Mapping[int, Tier],
        groups: Groups,
        x: torch.Tensor,
        out: torch.Tensor,
        activation: Activation,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """Compute a layer's experts.

        Args:
            layer: position among the MoE layers.
            wanted: tier by expert.
            groups: tokens by expert.
            x: [tokens, hidden].
            out: [tokens * top_k, hidden], written where an expert is wanted.
            activation: of the experts.
            look_ahead: called when every transfer that has a slot is under way.

        Raises:
            TransferError: an expert could not be fetched; nothing stays pinned.
        """
        if self.late:
            self.release_late()
        step = _Step(self, layer, wanted)
        try:
            step.run(self.kernel.begin(x, groups, step.order, out, activation), look_ahead)
        except BaseException:
            self._let_go(step.held)
            raise

    def release_late(self) -> None:
        """Take back the slots of reads that have ended after whoever waited for them had given up."""
        late, self.late = self.late, []
        for version in late:
            if self.engine.settle(version.ticket):
                self.cache.release(version)
            else:
                self.late.append(version)

    def _let_go(self, held: Iterable[Version]) -> None:
        """After a failure in the middle of a step: no slot stays pinned, none is freed while it is accessed."""
        last_read = self.engine.fence()  # a computation that failed between two projections has read the first
        for version in held:
            if version.ticket is not None:
                self.engine.cancel(version.ticket)
        for version in held:
            if not version.resident:
                settled = version.ticket is None or self.engine.settle(version.ticket)
                self.cache.abandon(version)
                if not settled:
                    version.slot.last_read = last_read
                    self.late.append(version)
                    continue
            self.cache.release(version, last_read)


class _Step:
    """What is left to do of one layer.

    Attributes:
        held: versions that are pinned.
        missing: experts without a slot.
        arriving: pinned versions whose bytes are on their way, first asked first.
        ready: pinned versions whose bytes are there, those that have just arrived last.
    """

    _work: LayerWork

    def __init__(self, pipeline: Pipeline, layer: int, wanted: Mapping[int, Tier]) -> None:
        self._cache, self._engine, self._prefetcher = pipeline.cache, pipeline.engine, pipeline.prefetcher
        self._bits, self._store, self._enqueues = pipeline.bits, pipeline.store, pipeline.kernel.asynchronous
        self._layer = layer
        self._shared = False  # whether residents have had their turn before what is on its way
        ahead = self._prefetcher.claim(layer, wanted) if self._prefetcher else ()
        # Every hit is pinned before the first miss is acquired: a miss must not evict what this step still reads.
        hits, misses = self._cache.acquire_held(layer, wanted)
        self.held = set(hits)
        self.missing = deque(misses)
        self.arriving = deque(version for version in hits if not version.resident)
        self.ready = [version for version in hits if version.resident]
        self._streamed = self._too_many(wanted) if misses or ahead else frozenset()
        self._must_keep = False
        for version in ahead:
            self._cache.adopt(version, stream=version.tier in self._streamed)
            self._cache.release(version)

    @property
    def order(self) -> list[int]:
        """Experts in about the order in which they will be computed."""
        there = [version.expert for version in (*self.ready, *self.arriving)]
        return there + [expert for expert, _ in self.missing]

    def run(self, work: LayerWork, look_ahead: LookAhead | None) -> None:
        """Until every wanted expert is computed."""
        self._work = work
        for version in self.held:
            work.place(version.expert, version.slot.expert)
        while self.missing or self.arriving or self.ready:
            self._fetch()
            if look_ahead is not None:
                look_ahead = look_ahead()
            if self._prefetcher:
                self._prefetcher.fill()  # which finds no slot as long as an expert of this layer waits for one
            if self.ready or self.arriving:
                self._compute_next()
            elif not ((self._prefetcher and self._prefetcher.settle()) or self._use_kept_slots()):
                raise TransferError(
                    f"every slot that could take another expert belongs to a read that has not ended ({self._store}); "
                    "check the disk."
                )
        if look_ahead is not None:
            look_ahead()
        if self._prefetcher:
            self._prefetcher.fill()

    def _too_many(self, wanted: Mapping[int, Tier]) -> frozenset[Tier]:
        """Tiers of which the step needs more experts than the layer may keep."""
        demand = Counter(wanted.values())
        return frozenset(tier for tier, count in demand.items() if count > self._cache.quota(self._layer, tier))

    def _fetch(self) -> None:
        """Start as many transfers as there are slots for."""
        while self.missing:
            expert, tier = self.missing[0]
            version = self._cache.acquire(
                self._layer, expert, tier, stream=tier in self._streamed, must_keep=self._must_keep
            )
            if version is None:
                if self._prefetcher and self._prefetcher.give_way(tier):
                    continue
                return
            self.held.add(version)
            self.missing.popleft()
            key = BlobKey(self._layer, expert, self._bits[tier])
            version.ticket = self._engine.submit(key, version.slot.blob, Reason.DEMAND, version.slot.last_read)
            self.arriving.append(version)
            self._work.place(expert, version.slot.expert)

    def _use_kept_slots(self) -> bool:
        """Late reads have the staging slots: make do with what the layer keeps. False if that was done already."""
        done_already = self._must_keep
        self._streamed, self._must_keep = frozenset(), True
        return not done_already

    def _compute_next(self) -> None:
        """Compute what is best computed now, which is not nothing."""
        in_turn, before = self._engine.occupies_cores, len(self.ready)
        while self.arriving and (in_turn or self._engine.arrived(self.arriving[0].ticket)):
            self.ready.append(self._receive(self.arriving.popleft()))
        if self._enqueues:
            self._enqueue_next(arrived=len(self.ready) - before)
        elif not self.ready:
            self._compute_arriving(1)
        elif self.missing and not in_turn:
            self._compute([self.ready.pop()])  # the one that arrived last, if any did: its slot is wanted
        else:
            self._compute_ready(len(self.ready))

    def _enqueue_next(self, arrived: int) -> None:
        """One launch: what has just arrived and a share of the residents, or half of what is on its way.

        The other half keeps the link busy until the launch has freed its slots. Residents are spread over the layer in
        proportion to the misses: all at once they would fill the device's queue, and the link would stand still behind
        them as long as slots are short.
        """
        half = (len(self.arriving) + 1) // 2
        residents = len(self.ready) - arrived
        if self._shared and half:
            residents = 0
        elif self.missing and half:
            to_come = len(self.arriving) + len(self.missing)
            residents = min(residents, max(half, -(-residents * half // to_come)))
        if arrived + residents:
            self._shared = self._shared or residents > 0
            self._compute_ready(arrived + residents)
        else:
            self._shared = False
            self._compute_arriving(half)

    def _compute_ready(self, count: int) -> None:
        """Compute the last `count` of what is there."""
        first = len(self.ready) - count
        self.ready, versions = self.ready[:first], self.ready[first:]
        self._compute(versions)

    def _compute_arriving(self, count: int) -> None:
        """Compute the first `count` of what is on its way, each projection as soon as all of them have it."""
        versions = [self.arriving.popleft() for _ in range(count)]

        def receive(projections: int) -> None:
            for version in versions:
                self._engine.wait(version.ticket, projections)

        self._compute(versions, receive)

    def _receive(self, version: Version) -> Version:
        self._engine.wait(version.ticket)
        self._cache.publish(version)
        return version

    def _compute(self, versions: Sequence[Version], receive: Receive | None = None) -> None:
        experts = [version.expert for version in versions]
        timeline = self._engine.timeline
        if timeline is None:
            self._work.compute(experts, receive)
        else:
            name = f"layer {self._layer}, {'expert' if len(experts) == 1 else 'experts'} {', '.join(map(str, experts))}"
            _compute_on(timeline, name, lambda receive: self._work.compute(experts, receive), receive)
        last_read = self._engine.fence()
        for version in versions:
            if not version.resident:
                self._receive(version)
            self.held.discard(version)
            self._cache.release(version, last_read)


def _compute_on(
    timeline: Timeline, name: str, compute: Callable[[Receive | None], None], receive: Receive | None
) -> None:
    """Compute, with a span for each piece between two waits."""
    begin = timeline.clock.mark()

    def end() -> None:
        timeline.add(Lane.COMPUTE, name, "compute", begin, timeline.clock.mark())

    def wait(count: int) -> None:
        nonlocal begin
        end()
        assert receive is not None
        receive(count)
        begin = timeline.clock.mark()

    compute(None if receive is None else wait)
    end()
