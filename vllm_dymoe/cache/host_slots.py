"""The slots of a host cache: an ExpertCache for each stored version.

Layers share the slots. This is the mechanism of :class:`~vllm_dymoe.cache.host_cache.HostCache`, which holds its lock
during every call. On a device a slice that no layer keeps is dropped after use. Here it stays until its slot is needed,
least recently used first, and may still be admitted until then.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_dymoe.cache.expert_cache import ExpertCache, Fetch, Fetcher
from vllm_dymoe.cache.pages import available_host_memory, whole_pages
from vllm_dymoe.cache.slots import Arena, SlotPool
from vllm_dymoe.cache.store import HostMemoryError, smallest_host_cache
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.store.shared import SharedMemory
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import ALL, Reason, State, Ticket
from vllm_dymoe.experts.format import ModelExperts, SliceKey, all_keys
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, HIT, STREAM
from vllm_dymoe.planner.table import Table, layer_quotas, set_pools

_CHUNK = 256 << 20  # bytes that are pinned per call: if the operating system allows only a part, most of that is used
_FEWEST = 2  # fewest staging slots


@dataclass
class HostCacheCounts:
    """Outcomes of the device's misses."""

    hits: int = 0  # slices that were in host memory
    misses: int = 0  # slices that had to be read


class HostSlots:
    """Slots with a hard budget, and the slices in them.

    HostMemoryError if the budget has no room for two slices of each version, or if memory cannot be allocated.

    Attributes:
        limit: bytes that slots may take.
        refused: why not all of them are pinned, if there is a device.
        fetchers: by bit-width. In the cache of one version, that version is the only precision, HIGH.
        counts: since the start or the last reset.
        held: slices in slots, or in flight.
        passing: those of ``held`` that no layer keeps, the last used at the end.
        coming: those of ``held`` that are still being read.
        leaving: slices no longer held that are still being copied out of their slots.
    """

    def __init__(
        self,
        experts: ModelExperts,
        nbytes: int,
        pinner: CudaPinner | None,
        engine: TransferEngine,
        shared: SharedMemory | None = None,  # memory for everything that other processes share
        counts: HostCacheCounts | None = None,  # counts to continue
        *,
        touches: bool = True,  # touch all memory now; reads that come next would do it while they wait for the disk
    ) -> None:
        self.limit, self._experts, self._engine, self.counts = nbytes, experts, engine, counts or HostCacheCounts()
        self.fetchers: dict[int, Fetcher[ExpertCache]] = {}
        self.held: dict[SliceKey, Fetch] = {}
        self.passing: OrderedDict[SliceKey, Fetch] = OrderedDict()
        self.coming: set[SliceKey] = set()
        self.leaving: list[Fetch] = []
        self.refused: str | None = None
        counts_of_kinds, found = slots_of_kinds(experts, nbytes), False
        if shared is not None:
            shared.begin(_nbytes(experts, counts_of_kinds))
            found = shared.found
        if not found:
            check_free(experts, nbytes, available_host_memory())
        arenas: list[Arena] = []  # all of them
        try:
            for bits in experts.formats:
                table, pools = _table(experts, counts_of_kinds), []
                for kind, count in enumerate(counts_of_kinds):
                    fmt, begin = experts.of_kinds[kind][bits], len(arenas)
                    each = whole_pages(fmt.nbytes)
                    most = max(1, _CHUNK // each)
                    for first in range(0, count, most):
                        arenas.append(arena := Arena(min(most, count - first) * each, pinner, shared))
                        if touches and not found:  # a machine short of memory would kill the process later
                            arena.memory.fill_(0)
                        self.refused = self.refused or arena.pin()
                    reserved = int(table.quotas[np.array(experts.kinds) == kind].sum())
                    pools.append(SlotPool(fmt, arenas[begin:], reserved, slot_bytes=each, lends=True))
                self._serve(bits, table, SlotPool.of_kinds(experts.formats[bits], pools))
        except OSError as error:
            self.close()
            for arena in arenas:
                arena.close()
            raise HostMemoryError(f"{nbytes} bytes of host memory could not be allocated ({error.strerror})") from error

    def _serve(self, bits: int, table: Table, pool: SlotPool) -> None:
        cache = ExpertCache(table, {Precision.HIGH: pool}, {Precision.HIGH: bits}, self._experts.kinds)
        self.fetchers[bits] = Fetcher(cache, self._engine)

    def reset_counts(self) -> None:
        self.counts = HostCacheCounts()

    @property
    def pools(self) -> list[SlotPool]:
        return [fetcher.cache.pools[Precision.HIGH] for fetcher in self.fetchers.values()]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def pinned(self) -> int:
        return sum(pool.pinned for pool in self.pools)

    @property
    def unbound(self) -> str | None:
        """The reason why some memory is not near the device.

        None if all of it is, or need not be.
        """
        return next((arena.unbound for pool in self.pools for arena in pool.arenas if arena.unbound), None)

    @property
    def orphans(self) -> list[Fetch]:
        """Fetches that were given up while their slots are still written or read."""
        return [*self.leaving, *(fetch for fetcher in self.fetchers.values() for fetch in fetcher.orphaned)]

    def assign_all(self) -> list[Fetch]:
        """Give every slice a slot for good; return fetches for the caller to fill.

        Call ``publish_all`` when they are filled. There must be as many slots as slices, all free.
        """
        for key in all_keys(self._experts):
            kind = self._experts.kinds[key.layer]
            slot = self.fetchers[key.bits].cache.pools[Precision.HIGH].take(kept=True, kind=kind)
            assert slot is not None
            filled = Ticket(key, slot.packed, Reason.DEMAND, state=State.DONE, arrived=ALL)
            self.held[key] = Fetch(key.layer, key.expert, Precision.HIGH, slot, True, filled)
        return list(self.held.values())

    def publish_all(self) -> None:
        for key, fetch in self.held.items():
            self.fetchers[key.bits].complete(fetch)

    def take(self, other: "HostSlots", experts: ModelExperts) -> None:
        """Take over another instance's slots; both must hold everything.

        Its layers follow this one's.
        """
        for key, fetch in other.held.items():
            moved = replace(key, layer=key.layer + len(self._experts.layers))
            self.held[moved] = replace(fetch, layer=moved.layer, ticket=replace(fetch.ticket, key=moved))
        kinds = [experts.of_kinds.index(formats) for formats in other._experts.of_kinds]
        self._experts, self.limit = experts, self.limit + other.limit
        for (bits, fetcher), theirs in zip(self.fetchers.items(), other.pools, strict=True):
            pool = fetcher.cache.pools[Precision.HIGH]
            pool.merge(theirs, kinds)
            self._serve(bits, _table(experts, [count for *_, count in pool.parts()]), pool)
        self.publish_all()

    def expect(self, layer: int, keys: list[SliceKey]) -> None:
        """Decide which of the needed slices a layer keeps.

        Starts to read those that are not in memory.
        """
        for bits, fetcher in self.fetchers.items():
            asked, table = sorted(key.expert for key in keys if key.bits == bits), fetcher.cache.table
            if not asked:
                continue
            active = np.array(asked, np.int64)
            places = table.begin_step(layer, active, np.full(len(active), HIGH, np.int8))[0].tolist()
            for expert, place in zip(asked, places, strict=True):
                key = SliceKey(layer, expert, bits)
                fetch = self.held.get(key)
                self.counts.hits += fetch is not None
                self.counts.misses += fetch is None
                if place == HIT:
                    continue
                if place >= 0:
                    self._drop(SliceKey(layer, place, bits))
                if fetch is None and not self._begin(key):
                    continue
                if place != STREAM and key in self.passing:
                    fetcher.keep(self.passing.pop(key))

    def _begin(self, key: SliceKey) -> bool:
        """Start to read a slice, if there is a slot for it; return whether there is."""
        start = self.fetchers[key.bits].start
        fetch = start(key.layer, key.expert, Precision.HIGH, Reason.DEMAND)
        if fetch is None and self._reclaim(key):
            fetch = start(key.layer, key.expert, Precision.HIGH, Reason.DEMAND)
        if fetch is None:
            return False
        self.held[key] = self.passing[key] = fetch
        self.coming.add(key)
        return True

    def use(self, key: SliceKey) -> bool:
        """Lend a slice that is in memory or in flight, until ``leave``.

        Returns whether there is a slot for it.
        """
        if key not in self.held and not self._begin(key):
            return False
        self.held[key].slot.readers += 1
        if key in self.passing:
            self.passing.move_to_end(key)
        return True

    def leave(self, fetch: Fetch) -> None:
        fetch.slot.readers -= 1
        self.collect()
        if fetch in self.leaving and not fetch.slot.readers:
            self.leaving.remove(fetch)
            self._give_up(fetch)

    @property
    def stuck(self) -> bool:
        """Whether slots can only come back from reads that were given up."""
        return not self.coming and not any(fetch.slot.readers for fetch in (*self.held.values(), *self.leaving))

    def collect(self) -> None:
        """Collect reads that have ended, and slots that are free again."""
        for key in [key for key in self.coming if self._ticket(key).ended or self._ticket(key).orphaned]:
            if self._engine.arrived(self._ticket(key)):
                self._complete(key)
            else:
                self._drop(key)
        for fetcher in self.fetchers.values():
            fetcher.collect()

    def settle(self) -> bool:
        """Give up reads in flight, and wait for them with a time limit.

        Returns whether all slots are free again.
        """
        for key in list(self.coming):
            self._drop(key)
        return all([fetcher.settle_all() for fetcher in self.fetchers.values()]) and not self.leaving

    def _reclaim(self, wanted: SliceKey) -> bool:
        """Free a slot for a wanted slice; return whether there is one.

        Drops the least recently used slice that no layer keeps.
        """
        kinds = self._experts.kinds
        for key, fetch in self.passing.items():
            idle = fetch.complete and not fetch.slot.readers
            fits = key.bits == wanted.bits and kinds[key.layer] == kinds[wanted.layer]
            if fits and idle:
                self._drop(key)
                return True
        return False

    def _complete(self, key: SliceKey) -> None:
        """Write the row of a complete slice.

        If the layer has filled its quota meanwhile, because a step failed, the slice is not kept.
        """
        self.coming.discard(key)
        fetch, fetcher = self.held[key], self.fetchers[key.bits]
        table = fetcher.cache.table
        if fetch.kept and np.count_nonzero(table.precision[key.layer]) >= table.quotas[key.layer, HIGH]:
            fetcher.let_pass(fetch)
            self.passing[key] = fetch
        fetcher.complete(fetch)

    def _drop(self, key: SliceKey) -> None:
        """Drop a slice; its slot is free when nothing reads or writes it."""
        fetch = self.held.pop(key)
        self.passing.pop(key, None)
        self.coming.discard(key)
        fetcher = self.fetchers[key.bits]
        if fetch.kept and fetch.complete:
            fetcher.cache.table.remove(key.layer, key.expert)
        fetcher.let_pass(fetch)
        if fetch.slot.readers:
            self.leaving.append(fetch)
        else:
            self._give_up(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        self.fetchers[fetch.ticket.key.bits].give_up([fetch])

    def _ticket(self, key: SliceKey) -> Ticket:
        return self.held[key].ticket

    def close(self) -> None:
        """Free the memory, after the last copies out of it; nothing may be read into it."""
        for pool in self.pools:
            for slot in pool.slots:
                if slot.last_read is not None:
                    slot.last_read.synchronize()
            pool.close()
        for of in (self.fetchers, self.held, self.passing, self.coming, self.leaving):
            of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, rows and slices are inconsistent.

        Every slot must be free or hold one slice, and quotas must be kept. Call it between steps.
        """
        self.collect()
        assert self.nbytes <= self.limit
        assert self.passing.keys() == {key for key, fetch in self.held.items() if not fetch.kept}
        for bits, fetcher in self.fetchers.items():
            held = [fetch for key, fetch in self.held.items() if key.bits == bits]
            rows = {(fetch.layer, fetch.expert): fetch.slot.index for fetch in held if fetch.kept and fetch.complete}
            table = fetcher.cache.table
            assert rows.keys() == table.residents(Precision.HIGH), "rows and kept slices differ"
            assert all(table.slot[0][row] == index for row, index in rows.items()), "a row names another slot"
            flying = [fetch for fetch in held if not (fetch.kept and fetch.complete)]
            flying += [fetch for fetch in self.orphans if fetch.ticket.key.bits == bits]
            fetcher.cache.check_integrity((fetch.precision, fetch.slot, fetch.kept) for fetch in flying)


def check_free(experts: ModelExperts, nbytes: int, free: int) -> None:
    """Raise HostMemoryError if a budget has too few slots, or exceeds the free memory."""
    if free < _nbytes(experts, slots_of_kinds(experts, nbytes)):
        raise HostMemoryError(f"host_memory would be {nbytes} bytes, but {free} bytes are free")


def _nbytes(experts: ModelExperts, counts: Sequence[int]) -> int:
    """Return the bytes of the slots of all kinds of layers."""
    sizes = (sum(whole_pages(fmt.nbytes) for fmt in formats.values()) for formats in experts.of_kinds)
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def slots_of_kinds(experts: ModelExperts, nbytes: int) -> list[int]:
    """Return the slots that a budget has for each kind of layers.

    Each kind gets slots for the same share of its experts, but at least two. HostMemoryError if that is impossible.
    """
    if nbytes < (smallest := smallest_host_cache(experts)):
        raise HostMemoryError(
            f"host_memory is {nbytes} bytes, but two slices of each version need {smallest}; set host_memory to at "
            f"least {smallest} bytes"
        )
    pages = [sum(whole_pages(fmt.nbytes) for fmt in formats.values()) for formats in experts.of_kinds]
    every = [experts.kinds.count(kind) * experts.num_experts for kind in range(len(pages))]
    least = sum(min(_FEWEST, most) * size for most, size in zip(every, pages, strict=True))
    rest = sum(max(0, most - _FEWEST) * size for most, size in zip(every, pages, strict=True))
    spare = min(rest, nbytes - least)
    return [min(_FEWEST, most) + spare * max(0, most - _FEWEST) // max(1, rest) for most in every]


def _table(experts: ModelExperts, counts: Sequence[int]) -> Table:
    """Return the table of what layers keep, given the slots of each kind."""
    each, quotas = experts.num_experts, np.zeros(len(experts.layers), np.int64)
    table = Table.allocate(len(quotas), each)
    for kind, count in enumerate(counts):
        mine = np.array(experts.kinds) == kind
        layers = int(mine.sum())
        passing = 0 if count == layers * each else max(_FEWEST, min(count // 8, experts.top_k * 4))
        quotas[mine] = layer_quotas(count, [1.0] * layers, min(passing, count), each)
    set_pools(table, {HIGH: [(0, 0, count) for count in counts]}, {HIGH: quotas.tolist()}, experts.kinds)
    return table
