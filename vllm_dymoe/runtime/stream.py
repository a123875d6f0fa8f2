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

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_dymoe.kernels import ExpertKernel
from vllm_dymoe.kernels.base import Receive
from vllm_dymoe.observe.timeline import Lane, Timeline
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.rule import HIT, PASS
from vllm_dymoe.residency.slots import Slot
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.counters import ResidencyCounts
from vllm_dymoe.runtime.fetcher import Fetch, Fetcher
from vllm_dymoe.runtime.memory import ExpertMemory
from vllm_dymoe.runtime.prefetch import Prefetcher
from vllm_dymoe.transfer import Reason, TransferEngine, TransferError

LookAhead = Callable[[], Callable[[], None] | None]
"""Foresees; returns what is left to do of it once the first experts compute (DuoServe-MoE 5.3), or None."""


@dataclass(eq=False, slots=True)
class _Held:
    """An expert that this step computes.

    Attributes:
        expert: its number.
        slots: where its bytes are, or arrive: a base slice in front of its fine one.
        fetches: that bring what was not there.
        lacking: the pool that each slice still needs a slot of, and whether it is to be kept.
    """

    expert: int
    slots: list[Slot] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    lacking: deque[tuple[Tier, bool]] = field(default_factory=deque)


class LayerStep:
    """What is left to do of one layer.

    To make one changes who is where already: it claims what was fetched ahead, and evicts victims.

    Args:
        layer: position among the MoE layers.
        wanted: tier by expert, ascending.
        places: what the residency rule makes of each of them: of each of its slices, where versions are nested.
        memory: who is where.
        fetcher: brings what is missing.
        engine: says what has arrived.
        prefetcher: has fetched ahead; None for nobody.
        counts: are counted here.
        kernel: computes.
        in_turn: experts are computed when all that have a slot are there, and not while others arrive.
    """

    _decision: Decision

    def __init__(
        self,
        layer: int,
        wanted: Mapping[int, Tier],
        places: Iterable[Sequence[int]],
        memory: ExpertMemory,
        fetcher: Fetcher,
        engine: TransferEngine,
        prefetcher: Prefetcher | None,
        counts: ResidencyCounts,
        *,
        kernel: ExpertKernel,
        in_turn: bool,
    ) -> None:
        self._layer, self._memory, self._fetcher, self._engine = layer, memory, fetcher, engine
        self._prefetcher, self._kernel, self._in_turn = prefetcher, kernel, in_turn
        self._counts = counts
        self._shared = False  # whether residents have had their turn before what is on its way
        self._must_keep = False  # whether misses take slots from what the layer keeps: no staging slot comes back
        self._ready: list[_Held] = []  # whose bytes are there, those that have just arrived last
        self._arriving: deque[_Held] = deque()  # first asked first
        keeping: list[_Held] = []
        streaming: list[_Held] = []
        ahead = prefetcher.claim(layer, wanted) if prefetcher else {}
        places = list(places)
        for (expert, tier), place in zip(wanted.items(), places, strict=True):
            if all(there == HIT for there in place):
                held, slots = memory.resident(layer, expert, tier)
                self._ready.append(_Held(expert, list(slots)))
                counts.hits += 1
                counts.reuses += held is not tier
                continue
            counts.promotions += tier is Tier.HI and bool(memory.table.tier[layer, expert])
            coming = self._acquire(expert, tier, place, ahead)
            complete = not coming.lacking and all(fetch.complete for fetch in coming.fetches)
            counts.hits += complete
            counts.misses += not complete
            if coming.lacking:
                (keeping if any(kept for _, kept in coming.lacking) else streaming).append(coming)
            else:
                (self._ready if complete else self._arriving).append(coming)
        # What has some of its slots goes first: a staging slot that waits for another one serves nobody.
        self._missing = deque(sorted(keeping + streaming, key=lambda coming: not coming.fetches))

    def _acquire(
        self, expert: int, tier: Tier, places: Sequence[int], ahead: Mapping[tuple[int, Tier], Fetch]
    ) -> _Held:
        """Make room for what is to be kept of an expert, and take what is there or on its way."""
        memory, coming = self._memory, _Held(expert)
        for part, place in zip(memory.parts[tier], places, strict=False):
            if place == HIT:
                slot = memory.slot_of(self._layer, expert, part)
                assert slot is not None
                coming.slots.append(slot)
                continue
            kept = place != PASS
            if kept:
                if not memory.nested:
                    memory.evict(self._layer, expert)  # in another version
                if place >= 0:
                    self._counts.evictions += memory.evict(self._layer, place, part)
            fetch = ahead.get((expert, part))
            if fetch is not None and coming.lacking:  # a fine slice whose base has given way to demand
                self._fetcher.give_up([fetch])
                fetch = None
            if fetch is None:
                coming.lacking.append((part, kept))
                continue
            if not all(brought.complete for brought in coming.fetches):
                fetch.complete = False  # a fine slice is published behind its base
            if kept:
                self._fetcher.keep(fetch)
            coming.slots.append(fetch.slot)
            coming.fetches.append(fetch)
        return coming

    def run(self, begin: Callable[[Sequence[int]], Decision], look_ahead: LookAhead | None) -> None:
        """Until every wanted expert is computed.

        Args:
            begin: begins the kernel's step, given the experts in about the order in which they will be computed.
            look_ahead: called when every transfer that has a slot is under way.

        Raises:
            TransferError: an expert could not be fetched; no slot is lost.
        """
        try:
            there = [held.expert for held in (*self._ready, *self._arriving)]
            order = [*there, *(held.expert for held in self._missing)]
            self._items = {expert: item for item, expert in enumerate(order)}
            self._decision = begin(order)
            for held in (*self._ready, *self._arriving):
                self._place(held)
            self._run(look_ahead)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """After a failure in the middle of a step: no slot is lost, none is freed while it is accessed."""
        held = [*self._ready, *self._arriving, *self._missing]
        last_read = self._engine.fence()
        if last_read is not None:  # a computation that failed between two projections has read the first
            for slot in (slot for reading in held for slot in reading.slots):
                slot.last_read = last_read
        self._fetcher.give_up((fetch for reading in held for fetch in reading.fetches), wait=True)

    def _run(self, look_ahead: LookAhead | None) -> None:
        while self._missing or self._arriving or self._ready:
            self._fetch()
            if look_ahead is not None:
                look_ahead = look_ahead()
            if self._prefetcher:
                self._prefetcher.fill()  # which finds no slot as long as an expert of this layer waits for one
            if self._ready or self._arriving:
                self._compute_next()
            elif not (self._fetcher.settle() or self._use_kept_slots()):
                raise TransferError(
                    "every slot that could take another expert belongs to a read that has not ended; check the disk."
                )
        if look_ahead is not None:
            look_ahead()
        if self._prefetcher:
            self._prefetcher.fill()

    def _fetch(self) -> None:
        """Start as many transfers as there are slots for."""
        while self._missing:
            coming = self._missing[0]
            tier, kept = coming.lacking[0]
            fetch = self._fetcher.start(self._layer, coming.expert, tier, Reason.DEMAND, kept=kept)
            if fetch is None:
                if self._prefetcher and self._prefetcher.give_way(tier):
                    continue
                if not self._must_keep or not self._make_room(tier, coming):
                    return
                coming.lacking[0] = tier, True
                continue
            coming.lacking.popleft()
            coming.slots.append(fetch.slot)
            coming.fetches.append(fetch)
            if coming.lacking:
                continue
            self._missing.popleft()
            self._arriving.append(coming)
            self._place(coming)

    def _place(self, held: _Held) -> None:
        self._decision.place(self._items[held.expert], self._memory.packed(held.slots))

    def _use_kept_slots(self) -> bool:
        """Orphaned copies have the staging slots: make do with what the layer keeps. False if that was done already."""
        done_already, self._must_keep = self._must_keep, True
        return not done_already

    def _make_room(self, tier: Tier, coming: _Held) -> bool:
        """Give up the coldest expert of the layer, or its fine slice, that this step does not read any more."""
        reading = {held.expert for held in (*self._ready, *self._arriving)}
        reading |= {held.expert for held in self._missing if held.slots}
        passing = [fetch for fetch in coming.fetches if not fetch.kept]
        if passing:  # a fine slice is kept with its base only
            if not self._evict_coldest(passing[0].tier, reading):
                return False
            self._fetcher.keep(passing[0])
        return self._evict_coldest(tier, reading)

    def _evict_coldest(self, tier: Tier, spared: set[int]) -> bool:
        victim = self._memory.table.coldest(self._layer, tier, spared)
        return victim is not None and self._memory.evict(self._layer, victim, tier)

    def _compute_next(self) -> None:
        """Compute what is best computed now, which is not nothing."""
        in_turn, before = self._in_turn, len(self._ready)
        while self._arriving and (in_turn or self._has_arrived(self._arriving[0])):
            self._complete(self._arriving[0])
            self._ready.append(self._arriving.popleft())
        if self._first_frees_a_slot():
            self._compute_ready(1)
        elif self._kernel.asynchronous:
            self._enqueue_next(arrived=len(self._ready) - before)
        elif not self._ready:
            self._compute_arriving(1)
        elif self._missing and not in_turn:
            self._compute_ready(1)  # the one that arrived last, if any did: its slot is wanted
        else:
            self._compute_ready(len(self._ready))

    def _first_frees_a_slot(self) -> bool:
        """Whether one expert is best computed by itself, because guesses wait for its slot (DuoServe-MoE 5.3)."""
        if self._in_turn or self._missing or self._arriving or len(self._ready) < 2:
            return False
        passing = any(not fetch.kept for fetch in self._ready[-1].fetches)
        return passing and self._prefetcher is not None and self._prefetcher.frees_slots_early

    def _enqueue_next(self, arrived: int) -> None:
        """One launch: what has just arrived and a share of the residents, or half of what is on its way.

        The other half keeps the link busy until the launch has freed its slots. Residents are spread over the layer in
        proportion to the misses: all at once they would fill the device's queue, and the link would stand still behind
        them as long as slots are short.
        """
        half = (len(self._arriving) + 1) // 2
        residents = len(self._ready) - arrived
        if self._shared and half:
            residents = 0
        elif self._missing and half:
            to_come = len(self._arriving) + len(self._missing)
            residents = min(residents, max(half, -(-residents * half // to_come)))
        if arrived + residents:
            self._shared = self._shared or residents > 0
            self._compute_ready(arrived + residents)
        else:
            self._shared = False
            self._compute_arriving(half)

    def _compute_ready(self, count: int) -> None:
        """Compute the last `count` of what is there."""
        self._compute(self._ready[len(self._ready) - count :])
        del self._ready[len(self._ready) - count :]

    def _compute_arriving(self, count: int) -> None:
        """Compute the first `count` of what is on its way, each projection as soon as all of them have it."""
        computing = [self._arriving[number] for number in range(count)]

        def receive(projections: int) -> None:
            for fetch in (fetch for held in computing for fetch in held.fetches):
                self._engine.wait(fetch.ticket, projections)

        self._compute(computing, receive)
        for _ in range(count):
            self._arriving.popleft()

    def _has_arrived(self, held: _Held) -> bool:
        return all(self._engine.arrived(fetch.ticket) for fetch in held.fetches)

    def _complete(self, held: _Held) -> None:
        for fetch in held.fetches:
            if not fetch.complete:
                self._fetcher.complete(fetch)

    def _compute(self, computing: Sequence[_Held], receive: Receive | None = None) -> None:
        experts = [held.expert for held in computing]
        timeline = self._engine.timeline
        items = [self._items[expert] for expert in experts]
        if timeline is None:
            self._kernel.compute(items, receive)
        else:
            name = f"layer {self._layer}, {'expert' if len(experts) == 1 else 'experts'} {', '.join(map(str, experts))}"
            _compute_on(timeline, name, lambda receive: self._kernel.compute(items, receive), receive)
        for held in computing:
            self._complete(held)
        last_read = self._engine.fence()
        for held in computing:
            brought = [fetch.slot for fetch in held.fetches]
            for slot in held.slots:
                if slot not in brought and last_read is not None:
                    slot.last_read = last_read
            for fetch in held.fetches:
                self._fetcher.release(fetch, last_read)


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
