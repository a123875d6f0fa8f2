"""One layer's experts through the slots: residents first, the others as they arrive, the next layer's behind them.

The schedule of DuoServe-MoE 5.2: each expert is fetched once, the link starts before anything is computed, and one slot
computes while others fill. Its grain is FIRM-MoE's: an expert is computed projection by projection as they arrive.
While slots are short, an expert that frees one goes first, because the link must not wait for computation; otherwise
all that is there is computed together, which costs the host least. Where computing only enqueues (a GPU) half of what
is on its way is computed in one launch, while the other half keeps the link busy.

Where a transfer is a copy by the cores that compute, there is nothing to overlap, and the two take turns: threads that
compete for a core cost both far more.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_dymoe.cache.counters import ResidencyCounts
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.slots import Slot
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.executor.prefetcher import Prefetcher
from vllm_dymoe.experts.format import EVERY_PROJECTION
from vllm_dymoe.kernels import ExpertKernel
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIT, STREAM
from vllm_dymoe.planner.table import coldest_of


@dataclass(eq=False, slots=True)
class _Held:
    """An expert that this step computes."""

    expert: int  # its number
    slots: list[Slot] = field(default_factory=list)
    """Where its bytes are, or arrive: a base slice in front of its fine one."""
    fetches: list[Fetch] = field(default_factory=list)  # that bring what was missing
    lacking: deque[tuple[Precision, bool]] = field(default_factory=deque)
    """The pool that each slice still needs a slot of, and whether it is to be kept."""
    item: int = -1  # its number in the Decision


class LayerStep:
    """What is left to do of one layer: :meth:`acquire`, then :meth:`run`."""

    def __init__(
        self,
        layer: int,
        fetcher: Fetcher[DeviceCache],
        prefetcher: Prefetcher | None,
        kernel: ExpertKernel,
        counts: ResidencyCounts,
        *,
        in_turn: bool,  # experts are computed when all that have a slot have arrived, and not while others arrive
        whole: bool = False,  # no projection of an expert is computed before the others are there
    ) -> None:
        self._layer, self._fetcher, self._prefetcher, self._kernel = layer, fetcher, prefetcher, kernel
        self._memory, self._engine = fetcher.cache, fetcher.engine
        self._counts, self._in_turn, self._whole = counts, in_turn, whole
        self._shared = False  # whether residents have had their turn before what is on its way
        self._must_keep = False  # whether misses take slots from what the layer keeps: no staging slot comes back
        self._ready: list[_Held] = []  # whose bytes are there, those that have just arrived last
        self._arriving: deque[_Held] = deque()  # first asked first
        self._missing: deque[_Held] = deque()
        self._computing: list[_Held] = []

    # -- slots ------------------------------------------------------------------------------------

    def acquire(self, wanted: Mapping[int, Precision], places: Iterable[Sequence[int]]) -> None:
        """Claim what was fetched ahead, and evict the victims of what is to be kept: ``places`` are what the rule makes
        of each wanted expert, in ascending order, slice by slice."""
        cache, counts = self._memory, self._counts
        keeping: list[_Held] = []
        passing: list[_Held] = []
        ahead = self._prefetcher.claim(self._layer, wanted) if self._prefetcher else {}
        places = list(places)
        for (expert, precision), place in zip(wanted.items(), places, strict=True):
            if all(there == HIT for there in place):
                held, slots = cache.resident(self._layer, expert, precision)
                self._ready.append(_Held(expert, list(slots)))
                counts.hits += 1
                counts.reuses += held is not precision
                continue
            counts.promotions += precision is Precision.HIGH and bool(cache.table.precision[self._layer, expert])
            coming = self._acquire_slices(expert, precision, place, ahead)
            complete = not coming.lacking and all(fetch.complete for fetch in coming.fetches)
            counts.hits += complete
            counts.misses += not complete
            if coming.lacking:
                (keeping if any(kept for _, kept in coming.lacking) else passing).append(coming)
            else:
                (self._ready if complete else self._arriving).append(coming)
        # What has some of its slots goes first: a staging slot that waits for another one serves nothing.
        self._missing.extend(sorted(keeping + passing, key=lambda coming: not coming.fetches))

    def _acquire_slices(
        self, expert: int, precision: Precision, places: Sequence[int], ahead: Mapping[tuple[int, Precision], Fetch]
    ) -> _Held:
        """Make room for what is to be kept of an expert, and take what is there or on its way."""
        cache, coming = self._memory, _Held(expert)
        for part, place in zip(cache.parts[precision], places, strict=False):
            if place == HIT:
                slot = cache.slot_of(self._layer, expert, part)
                assert slot is not None
                coming.slots.append(slot)
                continue
            fetch = ahead.get((expert, part))
            # A residual slice is kept with its base only, which may have come as a prediction that cannot be kept.
            kept = place != STREAM and all(brought.kept for brought in coming.fetches)
            if kept:
                if not cache.nested:
                    cache.evict(self._layer, expert)  # in another version
                if place >= 0:
                    self._counts.evictions += cache.evict(self._layer, place, part)
            if fetch is not None and coming.lacking:  # a residual slice whose base has given way to demand
                self._fetcher.give_up([fetch])
                fetch = None
            if fetch is None:
                coming.lacking.append((part, kept))
                continue
            if not all(brought.complete for brought in coming.fetches):
                fetch.complete = False  # a residual slice is published behind its base
            if kept:
                self._fetcher.keep(fetch)
            coming.slots.append(fetch.slot)
            coming.fetches.append(fetch)
        return coming

    def _fetch(self, plan: LayerPlan) -> None:
        while self._missing:
            coming = self._missing[0]
            precision, kept = coming.lacking[0]
            fetch = self._fetcher.start(self._layer, coming.expert, precision, Reason.DEMAND, kept=kept)
            if fetch is None:
                if self._prefetcher and self._prefetcher.give_way(precision):
                    continue
                if not self._must_keep or not self._make_room(precision, coming):
                    return
                coming.lacking[0] = precision, True
                continue
            coming.lacking.popleft()
            coming.slots.append(fetch.slot)
            coming.fetches.append(fetch)
            if not coming.lacking:
                self._arriving.append(self._missing.popleft())
                plan.place(coming.item, self._memory.packed(coming.slots))

    def _make_room(self, precision: Precision, coming: _Held) -> bool:
        """Give up the coldest expert of the layer, or its residual slice, that this step does not read any more."""
        reading = {held.expert for held in (*self._ready, *self._arriving)}
        reading |= {held.expert for held in self._missing if held.slots}
        passing = [fetch for fetch in coming.fetches if not fetch.kept]
        if passing:  # a residual slice is kept with its base only
            if not self._evict_coldest(passing[0].precision, reading):
                return False
            self._fetcher.keep(passing[0])
        return self._evict_coldest(precision, reading)

    def _evict_coldest(self, precision: Precision, spared: set[int]) -> bool:
        cache, layer = self._memory, self._layer
        victim = coldest_of(cache.table, layer, precision, spared)
        return victim is not None and cache.evict(layer, victim, precision)

    # -- computation ------------------------------------------------------------------------------

    def run(self, begin: Callable[[Sequence[int]], LayerPlan], look_ahead: Callable[[], None] | None) -> None:
        """Until every wanted expert is computed; after a TransferError no slot is lost. The kernel's step begins with
        the experts in about the order in which they will be computed; a prediction is asked for when every transfer
        that has a slot is under way."""
        try:
            held = [*self._ready, *self._arriving, *self._missing]
            for item, one in enumerate(held):
                one.item = item
            plan = begin([one.expert for one in held])
            for one in (*self._ready, *self._arriving):
                plan.place(one.item, self._memory.packed(one.slots))
            while self._ready or self._arriving or self._missing:
                self._fetch(plan)
                self._foresee(look_ahead)
                look_ahead = None
                if self._ready or self._arriving:
                    self._computing, arriving = self._next()
                    self._compute(arriving)
                elif not (self._fetcher.settle() or self._use_kept_slots()):
                    raise TransferError(
                        "every slot that could take another expert belongs to a read that has not ended; "
                        "check the disk."
                    )
            self._foresee(look_ahead)
            self._foresee(None)
        except BaseException:
            self._let_go()
            raise

    def _foresee(self, look_ahead: Callable[[], None] | None) -> None:
        if look_ahead is not None:
            look_ahead()
        elif self._prefetcher:
            self._prefetcher.answer()
        if self._prefetcher:
            self._prefetcher.fill()  # which finds no slot as long as an expert of this layer waits for one

    def _next(self) -> tuple[list[_Held], bool]:
        """What is best computed now, and whether it is still arriving."""
        ready, arriving, before = self._ready, self._arriving, len(self._ready)
        while arriving and (self._in_turn or all(self._engine.arrived(f.ticket) for f in arriving[0].fetches)):
            self._complete(arriving[0])
            ready.append(arriving.popleft())
        arrived = len(ready) - before
        if self._first_frees_a_slot():
            return _last(ready, 1), False
        if self._kernel.asynchronous:
            return self._next_launch(arrived)
        if not ready:
            return [arriving.popleft()], True
        # While more are missing the one that arrived last goes first, if any did: its slot is wanted.
        return _last(ready, 1 if self._missing and not self._in_turn else len(ready)), False

    def _first_frees_a_slot(self) -> bool:
        """Whether one expert is best computed by itself, because predictions wait for its slot (DuoServe-MoE 5.3)."""
        if self._in_turn or self._missing or self._arriving or len(self._ready) < 2:
            return False
        passing = any(not fetch.kept for fetch in self._ready[-1].fetches)
        return passing and self._prefetcher is not None and self._prefetcher.frees_slots_early

    def _next_launch(self, arrived: int) -> tuple[list[_Held], bool]:
        """What has just arrived and a share of the residents, or half of what is on its way.

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
            return _last(self._ready, arrived + residents), False
        self._shared = False
        return [self._arriving.popleft() for _ in range(half)], True

    def _compute(self, arriving: bool) -> None:
        """Compute, each projection as soon as all have it, and free the slots of what passes."""
        computing = self._computing

        def receive(projections: int) -> None:
            for fetch in (fetch for held in computing for fetch in held.fetches):
                self._engine.wait(fetch.ticket, projections)

        if arriving and self._whole:
            receive(len(EVERY_PROJECTION))
        self._kernel.compute([held.item for held in computing], receive if arriving else None)
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
        self._computing = []

    def _complete(self, held: _Held) -> None:
        for fetch in held.fetches:
            if not fetch.complete:
                self._fetcher.complete(fetch)

    def _use_kept_slots(self) -> bool:
        """Orphaned copies have the staging slots: make do with what the layer keeps. False if that was done already."""
        done_already, self._must_keep = self._must_keep, True
        return not done_already

    def _let_go(self) -> None:
        """After a failure in the middle of a step: no slot is lost, none is freed while it is accessed."""
        held = [*self._computing, *self._ready, *self._arriving, *self._missing]
        last_read = self._engine.fence()
        if last_read is not None:  # a computation that failed between two projections has read the first
            for slot in (slot for reading in held for slot in reading.slots):
                slot.last_read = last_read
        self._fetcher.give_up((fetch for reading in held for fetch in reading.fetches), wait=True)


def _last(held: list[_Held], count: int) -> list[_Held]:
    taken = held[len(held) - count :]
    del held[len(held) - count :]
    return taken
