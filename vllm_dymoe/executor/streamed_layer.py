"""A layer on a CPU some of whose experts are fetched into slots.

It computes the hits first, and the others as they arrive. The schedule is DuoServe-MoE's (5.2): each expert is fetched
once, the link starts before anything is computed, and one slot is computed while others fill.

- While slots are short, an expert that frees one is computed first, because the link must not wait for computation.
- Otherwise all experts that have arrived are computed together, which costs the host least.
- If transfers are copies by the cores that compute, copying and computing alternate, because threads that compete for
  a core slow down both.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vllm_dymoe.cache.counters import ResidencyCounts
from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.expert_cache import Fetch, Fetcher
from vllm_dymoe.cache.slots import Slot
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.executor.prefetcher import Prefetcher
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import coldest_of


@dataclass(eq=False, slots=True)
class _Held:
    """An expert that this step computes, with its slots and fetches."""

    expert: int  # its number
    precision: Precision  # the precision that is wanted
    slots: list[Slot] = field(default_factory=list)
    """Where its bytes are or arrive; a base slice comes before its residual slice."""
    fetches: list[Fetch] = field(default_factory=list)  # transfers of missing slices
    lacking: deque[tuple[Precision, bool]] = field(default_factory=deque)
    """For each slice without a slot: the pool to take one from, and whether the slice will be kept."""
    item: int = -1  # number in the plan, whose items are in the order of computation


class LayerStep:
    """One layer's step by a plan.

    :meth:`acquire` claims slots; :meth:`run` fetches and computes.
    """

    def __init__(
        self,
        layer: int,
        plan: LayerPlan,  # host-planned, without items that the CPU executes
        fetcher: Fetcher[DeviceCache],
        prefetcher: Prefetcher | None,
        kernel: CpuKernel,
        counts: ResidencyCounts,
        *,
        in_turn: bool,  # wait until all experts that have a slot have arrived, then compute
    ) -> None:
        self._layer, self._plan = layer, plan
        self._fetcher, self._prefetcher, self._kernel = fetcher, prefetcher, kernel
        self._memory, self._engine = fetcher.cache, fetcher.engine
        self._counts, self._in_turn = counts, in_turn
        self._must_keep = False  # misses take slots that the layer keeps, because no staging slot will be free
        self._ready: list[_Held] = []  # experts whose bytes are complete; the latest arrivals are last
        self._arriving: deque[_Held] = deque()  # in the order of their transfers
        self._missing: deque[_Held] = deque()
        self._computing: list[_Held] = []

    # -- slots ------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Claim prefetched experts, and evict the victims of those that are admitted."""
        cache, counts, plan, wanted = self._memory, self._counts, self._plan, self._plan.wanted
        admitted: list[_Held] = []
        streamed: list[_Held] = []
        ahead = self._prefetcher.claim(self._layer, wanted) if self._prefetcher else {}
        decided = zip(wanted.items(), plan.action.T.tolist(), plan.victims.T.tolist(), strict=True)
        for item, ((expert, precision), actions, victims) in enumerate(decided):
            if all(action == Action.HIT for action in actions):
                held, slots = cache.resident(self._layer, expert, precision)
                self._ready.append(_Held(expert, precision, list(slots), item=item))
                counts.hits += 1
                counts.reuses += held is not precision
                continue
            counts.promotions += precision is Precision.HIGH and bool(cache.table.precision[self._layer, expert])
            coming = _Held(expert, precision, item=item)
            self._acquire_slices(coming, actions, victims, ahead)
            complete = not coming.lacking and all(fetch.complete for fetch in coming.fetches)
            counts.hits += complete
            counts.misses += not complete
            if coming.lacking:
                (admitted if any(kept for _, kept in coming.lacking) else streamed).append(coming)
            else:
                (self._ready if complete else self._arriving).append(coming)
        # Experts that have one of two slots go first: a slot that waits for its partner is useless.
        self._missing.extend(sorted(admitted + streamed, key=lambda coming: not coming.fetches))

    def _acquire_slices(
        self,
        coming: _Held,
        actions: Sequence[int],
        victims: Sequence[int],
        ahead: Mapping[tuple[int, Precision], Fetch],
    ) -> None:
        """Evict what an admitted expert replaces, and take the expert's slots.

        Slots are taken if they are filled or in flight; other slices are noted as lacking one.
        """
        cache, expert = self._memory, coming.expert
        for part, action, victim in zip(cache.parts[coming.precision], actions, victims, strict=False):
            if action == Action.HIT:
                slot = cache.slot_of(self._layer, expert, part)
                assert slot is not None
                coming.slots.append(slot)
                continue
            fetch = ahead.get((expert, part))
            # A residual slice is kept only with its base, which may be a prediction that cannot be kept.
            kept = action == Action.ADMIT and all(brought.kept for brought in coming.fetches)
            if kept:
                if not cache.nested:
                    cache.evict(self._layer, expert)  # in another version
                if victim >= 0:
                    self._counts.evictions += cache.evict(self._layer, victim, part)
            if fetch is not None and coming.lacking:  # the base's slot was given to a demand
                self._fetcher.give_up([fetch])
                fetch = None
            if fetch is None:
                coming.lacking.append((part, kept))
                continue
            if not all(brought.complete for brought in coming.fetches):
                fetch.complete = False  # a residual slice is published after its base
            if kept:
                self._fetcher.keep(fetch)
            coming.slots.append(fetch.slot)
            coming.fetches.append(fetch)

    def _fetch(self) -> None:
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
                self._plan.place(coming.item, self._memory.packed(coming.slots))

    def _make_room(self, precision: Precision, coming: _Held) -> bool:
        """Evict the coldest expert of the layer that this step no longer reads.

        If versions are nested, the victim may be a residual slice alone.
        """
        reading = {held.expert for held in (*self._ready, *self._arriving)}
        reading |= {held.expert for held in self._missing if held.slots}
        bases = [fetch for fetch in coming.fetches if not fetch.kept]
        if bases:  # a residual slice is kept only with its base
            if not self._evict_coldest(bases[0].precision, reading):
                return False
            self._fetcher.keep(bases[0])
        return self._evict_coldest(precision, reading)

    def _evict_coldest(self, precision: Precision, spared: set[int]) -> bool:
        cache, layer = self._memory, self._layer
        victim = coldest_of(cache.table, layer, precision, spared)
        return victim is not None and cache.evict(layer, victim, precision)

    # -- computation ------------------------------------------------------------------------------

    def run(self, x: Tensor, out: Tensor, activation: Activation, look_ahead: Callable[[], None] | None) -> None:
        """Fetch and compute until every item is done; a TransferError loses no slot.

        Args:
            x: [rows, hidden].
            out: [tokens * top_k, hidden], written where pairs of the plan's items are.
            look_ahead: asks for predictions; called once, when every transfer that has a slot is in flight.
        """
        try:
            held = [*self._ready, *self._arriving, *self._missing]  # in about the order of computation
            self._plan = self._plan.select([one.item for one in held])
            for item, one in enumerate(held):
                one.item = item
            self._kernel.begin(x, self._plan, out, activation)
            for one in (*self._ready, *self._arriving):
                self._plan.place(one.item, self._memory.packed(one.slots))
            while self._ready or self._arriving or self._missing:
                self._fetch()
                self._foresee(look_ahead)
                look_ahead = None
                if self._ready or self._arriving:
                    self._computing = self._next()
                    self._compute()
                elif not (self._fetcher.settle() or self._use_kept_slots()):
                    raise TransferError(
                        "every slot that could take another expert belongs to a read that has not ended; "
                        "check the disk."
                    )
            self._foresee(look_ahead)
        except BaseException:
            self._let_go()
            raise

    def _foresee(self, look_ahead: Callable[[], None] | None) -> None:
        if look_ahead is not None:
            look_ahead()
        if self._prefetcher:
            self._prefetcher.fill()  # finds no free slot while an expert of this layer waits for one

    def _next(self) -> list[_Held]:
        """Choose the experts to compute next; one may be arriving still."""
        ready, arriving = self._ready, self._arriving
        while arriving and (self._in_turn or all(self._engine.arrived(f.ticket) for f in arriving[0].fetches)):
            self._complete(arriving[0])
            ready.append(arriving.popleft())
        if self._first_frees_a_slot():
            return _last(ready, 1)
        if not ready:
            return [arriving.popleft()]
        # While others wait for slots, compute only the latest arrival: its slot is needed.
        return _last(ready, 1 if self._missing and not self._in_turn else len(ready))

    def _first_frees_a_slot(self) -> bool:
        """Return whether to compute one expert by itself.

        That is so if predictions wait for its slot (DuoServe-MoE 5.3).
        """
        if self._in_turn or self._missing or self._arriving or len(self._ready) < 2:
            return False
        streamed = any(not fetch.kept for fetch in self._ready[-1].fetches)
        return streamed and self._prefetcher is not None and self._prefetcher.frees_slots_early

    def _compute(self) -> None:
        """Compute experts, and free the slots of streamed ones."""
        for held in self._computing:
            self._complete(held)
        self._kernel.compute([held.item for held in self._computing])
        for fetch in (fetch for held in self._computing for fetch in held.fetches):
            self._fetcher.release(fetch)
        self._computing = []

    def _complete(self, held: _Held) -> None:
        for fetch in held.fetches:
            if not fetch.complete:
                self._fetcher.complete(fetch)

    def _use_kept_slots(self) -> bool:
        """Use slots that the layer keeps, because orphaned copies hold the staging slots.

        Return False if done already.
        """
        done_already, self._must_keep = self._must_keep, True
        return not done_already

    def _let_go(self) -> None:
        """Clean up after a failure within a step.

        No slot is lost, and none is freed that is still accessed.
        """
        held = [*self._computing, *self._ready, *self._arriving, *self._missing]
        self._fetcher.give_up((fetch for reading in held for fetch in reading.fetches), wait=True)


def _last(held: list[_Held], count: int) -> list[_Held]:
    taken = held[len(held) - count :]
    del held[len(held) - count :]
    return taken
