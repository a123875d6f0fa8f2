"""The fetcher: brings experts into slots, and takes slots back from copies that are wanted no more.

It decides nothing. Giving up is written once, for predictions that were wrong and for steps that failed: no slot is
free while anything still writes it. A copy that was given up while it moved is *orphaned* until it ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_dymoe.cache.expert_cache import ExpertCache
from vllm_dymoe.cache.slots import Slot
from vllm_dymoe.cache.transfer import Reason, TransferEngine
from vllm_dymoe.cache.transfer.ticket import Ticket
from vllm_dymoe.experts.format import EVERY_PROJECTION, SliceKey
from vllm_dymoe.planner.precision import Precision

_ALL = len(EVERY_PROJECTION)


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


class Fetcher:
    """Moves one rank's experts; a copy that overlaps waits for the slot's last reader alone, others for all of them."""

    def __init__(self, cache: ExpertCache, engine: TransferEngine, *, overlaps: bool = True) -> None:
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
        slot = self.cache.pools[precision].take(kept=kept)
        if slot is None:
            return None
        key = SliceKey(layer, expert, self.cache.bits[precision])
        after = slot.last_read if self._overlaps else self.engine.fence()
        ticket = self.engine.submit(key, slot.packed, reason, after, projections)
        return Fetch(layer, expert, precision, slot, kept, ticket)

    def keep(self, fetch: Fetch) -> None:
        fetch.kept = True
        self.cache.pools[fetch.precision].keep()
        if fetch.complete:
            self._publish(fetch)

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
                if fetch.kept:  # its layer fills its share without it
                    self.cache.pools[fetch.precision].lend()
                    fetch.kept = False
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
