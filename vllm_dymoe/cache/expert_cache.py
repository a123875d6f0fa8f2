"""Which experts are in which slots of one memory tier, and what brings them there.

An ExpertCache is a table and the slots that its rows name: one of a device, and one of host memory for each version
that is stored. A Fetcher fills it. It decides nothing. Giving up is written once, for predictions that were wrong and
for steps that failed: no slot is free while anything still writes it. A copy that was given up while it moved is
*orphaned* until it ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_dymoe.cache.slots import Slot, SlotPool
from vllm_dymoe.cache.transfer import Reason, TransferEngine
from vllm_dymoe.cache.transfer.ticket import Ticket
from vllm_dymoe.experts.format import EVERY_PROJECTION, SliceKey
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import CODES, Table, check_integrity

_ALL = len(EVERY_PROJECTION)


class ExpertCache:
    """A table, and the slots of each precision that its rows name.

    Attributes:
        table: which experts are in slots, on the host.
        pools: slots by precision.
        bits: of what the slots of each precision hold.
        kinds: of each layer, see ``ModelExperts.kinds``.
    """

    table: Table

    def __init__(
        self, table: Table, pools: Mapping[Precision, SlotPool], bits: Mapping[Precision, int], kinds: Sequence[int]
    ) -> None:
        self.table, self.pools, self.bits, self.kinds = table, pools, bits, kinds

    @property
    def nested(self) -> bool:
        """Whether slots of the low precision hold bases, and those of the high one residual slices."""
        return self.table.nested

    def slot_of(self, layer: int, expert: int, part: Precision) -> Slot | None:
        """The slot in a precision's pool that an expert's row names, if it does, where the versions are nested."""
        index = self.table.slot[int(part is Precision.HIGH), layer, expert]
        return self.pools[part].slots[index] if index >= 0 else None

    def evict(self, layer: int, expert: int, part: Precision | None = None) -> bool:
        """Free an expert's slots, which the next copy may write once their last reader has ended; False if it has none.
        For the pool of residual slices it keeps its base."""
        freed = self.table.remove(layer, expert, residual=self.nested and part is Precision.HIGH)
        for precision, index in freed:
            self.pools[precision].give_back(self.pools[precision].slots[index], kept=True)
        return bool(freed)

    def check_integrity(self, in_flight: Iterable[tuple[Precision, Slot, bool]], *, moving: bool = False) -> None:
        """AssertionError unless every slot is free, in a row, or in flight (to be kept or not), and layers keep no more
        than their quotas, all together if quotas are moving."""
        flying = list(in_flight)
        check_integrity(self.table, moving=moving)
        for precision, pool in self.pools.items():
            filling = [(slot.index, kept) for other, slot, kept in flying if other is precision]
            named = self.table.slots(precision)
            pool.check_integrity(named + [index for index, _ in filling])
            quota = int(self.table.quotas[:, CODES[precision]].sum())
            reserved = quota - len(named) - sum(kept for _, kept in filling)
            assert pool.reserved == reserved, f"{pool.reserved} slots are reserved, expected {reserved}"


Cache = TypeVar("Cache", bound=ExpertCache)


@dataclass(eq=False, slots=True)
class Fetch:
    """An expert on its way into a slot, which is its own until it is kept or released."""

    layer: int  # of the expert
    expert: int  # its number on this rank
    precision: Precision  # version that comes
    slot: Slot  # where to
    kept: bool  # the layer keeps it; otherwise it goes when it has been used
    ticket: Ticket  # of the transfer
    complete: bool = False  # the bytes are there


class Fetcher(Generic[Cache]):
    """Moves one rank's experts; a copy that overlaps waits for the slot's last reader alone, others for all of them."""

    def __init__(self, cache: Cache, engine: TransferEngine, *, overlaps: bool = True) -> None:
        self.cache, self.engine, self._overlaps = cache, engine, overlaps
        self.orphaned: list[Fetch] = []  # given up while they moved, and perhaps still written

    def start(
        self,
        layer: int,
        expert: int,
        precision: Precision,
        reason: Reason,
        *,
        kept: bool = False,
        projections: int = _ALL,
    ) -> Fetch | None:
        """Begin to bring an expert into a free slot, one that its layer was promised if it is kept there; None if there
        is none now. So many projections are brought before the rest is demanded."""
        slot = self.cache.pools[precision].take(kept=kept, kind=self.cache.kinds[layer])
        if slot is None:
            return None
        key = SliceKey(layer, expert, self.cache.bits[precision])
        after = slot.last_read if self._overlaps else self.engine.fence()
        ticket = self.engine.submit(key, slot.packed, reason, after, projections)
        return Fetch(layer, expert, precision, slot, kept, ticket)

    def keep(self, fetch: Fetch) -> None:
        fetch.kept = True
        self.cache.pools[fetch.precision].keep(fetch.slot)
        if fetch.complete:
            self._publish(fetch)

    def let_pass(self, fetch: Fetch) -> None:
        """Do not keep it after all."""
        if fetch.kept:
            self.cache.pools[fetch.precision].lend(fetch.slot)
            fetch.kept = False

    def complete(self, fetch: Fetch) -> None:
        """Wait for an expert, or raise TransferError; the table names it from now on if it is kept."""
        self.engine.wait(fetch.ticket)
        fetch.complete = True
        if fetch.kept:
            self._publish(fetch)

    def release(self, fetch: Fetch, last_read: Any) -> None:
        """An expert has been used: its slot is free unless kept, for a copy behind the computation that reads it."""
        if last_read is not None:
            fetch.slot.last_read = last_read
        if not fetch.kept:
            self._free(fetch)

    def give_up(self, fetches: Iterable[Fetch], *, wait: bool = False) -> None:
        """Have no more use for experts that were brought, but for what is kept and complete; slots are free at once, or
        when what moves has ended, for which this may wait as long as the engine does."""
        unwanted = [fetch for fetch in fetches if not (fetch.kept and fetch.complete)]
        cancelled = [self.engine.cancel(fetch.ticket) for fetch in unwanted]
        for fetch, free in zip(unwanted, cancelled, strict=True):
            if fetch.complete or (self.engine.settle(fetch.ticket) if wait else free or fetch.ticket.ended):
                self._free(fetch)
            else:
                self.let_pass(fetch)  # its layer fills its quota without it
                self.orphaned.append(fetch)

    def collect(self) -> bool:
        """Take back the slots of orphaned copies that have ended; whether there were any."""
        return self._take_back(fetch for fetch in self.orphaned if fetch.ticket.ended)

    def settle(self) -> bool:
        """Wait for the slot of an orphaned copy; False if there is none, or it does not end."""
        if self.collect():
            return True
        return any(self._take_back([fetch]) for fetch in list(self.orphaned))

    def settle_all(self) -> bool:
        """Wait for every orphaned copy; whether all slots came back."""
        while self.orphaned and self.settle():
            pass
        return not self.orphaned

    def _take_back(self, among: Iterable[Fetch]) -> bool:
        back = [fetch for fetch in among if self.engine.settle(fetch.ticket)]
        for fetch in back:
            self.orphaned.remove(fetch)
            self._free(fetch)
        return bool(back)

    def _free(self, fetch: Fetch) -> None:
        self.cache.pools[fetch.precision].give_back(fetch.slot, kept=fetch.kept)

    def _publish(self, fetch: Fetch) -> None:
        self.cache.table.publish(fetch.layer, fetch.expert, fetch.precision, fetch.slot.index)
