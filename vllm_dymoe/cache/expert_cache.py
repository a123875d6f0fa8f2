"""The cache of one memory tier, and the fetcher that fills its slots.

An ExpertCache is a table and the slots that its rows name: one for a device, and one in host memory for each stored
version. A Fetcher fills it; neither decides anything. Giving up fetches is implemented once, for wrong predictions and
for failed steps: no slot is free while anything still writes it. A copy that was given up while it moved is *orphaned*
until it ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
        bits: bits in the slots of each precision.
        kinds: of each layer, see ``ModelExperts.kinds``.
    """

    table: Table

    def __init__(
        self, table: Table, pools: Mapping[Precision, SlotPool], bits: Mapping[Precision, int], kinds: Sequence[int]
    ) -> None:
        self.table, self.pools, self.bits, self.kinds = table, pools, bits, kinds

    @property
    def nested(self) -> bool:
        """Whether the LOW pool holds bases and the HIGH pool residual slices."""
        return self.table.nested

    def slot_of(self, layer: int, expert: int, part: Precision) -> Slot | None:
        """Return the slot that an expert's row names in a pool, or None.

        Only for nested versions.
        """
        index = self.table.slot[int(part is Precision.HIGH), layer, expert]
        return self.pools[part].slots[index] if index >= 0 else None

    def evict(self, layer: int, expert: int, part: Precision | None = None) -> bool:
        """Free an expert's slots; return False if it has none.

        Copies into them wait for their last reader. ``part`` HIGH frees only the residual slice and keeps its base.
        """
        freed = self.table.remove(layer, expert, residual=self.nested and part is Precision.HIGH)
        for precision, index in freed:
            self.pools[precision].give_back(self.pools[precision].slots[index], kept=True)
        return bool(freed)

    def check_integrity(self, in_flight: Iterable[tuple[Precision, Slot, bool]], *, moving: bool = False) -> None:
        """Raise AssertionError if slots, rows and fetches are inconsistent.

        Every slot must be free, in a row, or in flight, and layers must keep their quotas.

        Args:
            in_flight: precision, slot, and whether it will be kept, of each fetch.
            moving: check only the sum of the quotas.
        """
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
    """An expert in flight to a slot.

    The slot belongs to the fetch until the expert is kept or released.
    """

    layer: int  # of the expert
    expert: int  # the rank's number of the expert
    precision: Precision  # version that is fetched
    slot: Slot  # destination
    kept: bool  # the layer keeps the expert; otherwise the slot is freed after use
    ticket: Ticket  # of the transfer
    complete: bool = False  # the bytes have arrived


class Fetcher(Generic[Cache]):
    """Fetches one rank's experts into slots.

    A copy to a device waits for all computation so far, because nobody records which kernel reads a slot last; a copy
    into host memory waits for the last copy out of its slot.
    """

    def __init__(self, cache: Cache, engine: TransferEngine) -> None:
        self.cache, self.engine = cache, engine
        self.orphaned: list[Fetch] = []  # given up in flight, so their slots may still be written

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
        """Start to fetch an expert; return None if no slot is free now.

        The expert goes into a free slot, or a reserved one if ``kept``. Only the first ``projections`` are transferred
        until the rest is demanded.
        """
        slot = self.cache.pools[precision].take(kept=kept, kind=self.cache.kinds[layer])
        if slot is None:
            return None
        key = SliceKey(layer, expert, self.cache.bits[precision])
        computed = self.engine.fence()
        after = slot.last_read if computed is None else computed
        ticket = self.engine.submit(key, slot.packed, reason, after, projections)
        return Fetch(layer, expert, precision, slot, kept, ticket)

    def keep(self, fetch: Fetch) -> None:
        fetch.kept = True
        self.cache.pools[fetch.precision].keep(fetch.slot)
        if fetch.complete:
            self._publish(fetch)

    def let_pass(self, fetch: Fetch) -> None:
        """Cancel that the expert will be kept."""
        if fetch.kept:
            self.cache.pools[fetch.precision].lend(fetch.slot)
            fetch.kept = False

    def complete(self, fetch: Fetch) -> None:
        """Wait for an expert; if it is kept, the table names it from now on.

        Raises TransferError if it does not arrive.
        """
        self.engine.wait(fetch.ticket)
        fetch.complete = True
        if fetch.kept:
            self._publish(fetch)

    def release(self, fetch: Fetch) -> None:
        """Free the slot of a used expert unless it is kept."""
        if not fetch.kept:
            self._free(fetch)

    def give_up(self, fetches: Iterable[Fetch], *, wait: bool = False) -> None:
        """Give up fetches, except those that are kept and complete.

        Slots are free at once, or when moving copies have ended; ``wait`` waits for these, as long as the engine does.
        """
        unwanted = [fetch for fetch in fetches if not (fetch.kept and fetch.complete)]
        cancelled = [self.engine.cancel(fetch.ticket) for fetch in unwanted]
        for fetch, free in zip(unwanted, cancelled, strict=True):
            if fetch.complete or (self.engine.settle(fetch.ticket) if wait else free or fetch.ticket.ended):
                self._free(fetch)
            else:
                self.let_pass(fetch)  # its layer will fill its quota without it
                self.orphaned.append(fetch)

    def collect(self) -> bool:
        """Free the slots of orphaned copies that have ended.

        Returns whether there were any.
        """
        return self._take_back(fetch for fetch in self.orphaned if fetch.ticket.ended)

    def settle(self) -> bool:
        """Wait for the slot of an orphaned copy.

        Returns False if there is none, or if it does not end.
        """
        if self.collect():
            return True
        return any(self._take_back([fetch]) for fetch in list(self.orphaned))

    def settle_all(self) -> bool:
        """Wait for every orphaned copy; return whether all slots are free again."""
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
