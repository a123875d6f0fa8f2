"""The slots of a host cache: which slice is in which, on its way or not, and which may go.

Mechanism of :class:`~vllm_dymoe.cache.host_cache.HostCache`, which holds its lock for every call.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_dymoe.cache.pages import available_host_memory, whole_pages
from vllm_dymoe.cache.slots import Arena, Slot, SlotPool
from vllm_dymoe.cache.store import HostMemoryError, smallest_host_cache
from vllm_dymoe.cache.store.page_lock import CudaPageLock
from vllm_dymoe.cache.store.shared import SharedMemory
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import Reason, Ticket
from vllm_dymoe.experts.format import ModelExperts, SliceKey, all_keys
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, HIT, STREAM
from vllm_dymoe.planner.table import Table, check_integrity, layer_quotas, set_pools

_CHUNK = 256 << 20  # bytes that are locked at once: where the operating system allows less than all, most of it is used
_FEWEST = 2  # slots that no layer keeps


@dataclass(eq=False, slots=True)
class Held:
    """A slice in a slot, or on its way there."""

    key: SliceKey
    slot: Slot
    ticket: Ticket | None = None  # of the read that fills it, until that has ended
    kept: bool = False  # a layer keeps it; otherwise it goes when its slot is wanted
    prediction: bool = False  # it was read ahead for a layer that has not come yet
    users: int = 0  # copies out of it that have not been enqueued so far
    dropped: bool = False  # its slot is free when the last user has gone


@dataclass
class HostPredictions:
    """Slices that were to be read ahead: all, those that were asked for, and those that gave way to demand."""

    made: int = 0
    useful: int = 0
    dropped: int = 0


@dataclass
class HostCacheCounts:
    """What became of the device's misses."""

    hits: int = 0  # slices that were in host memory, or on their way there as predictions in time
    misses: int = 0  # slices that had to be read
    predictions: HostPredictions = field(default_factory=HostPredictions)


class HostSlots:
    """An arena of slots with a hard budget, and a table for each version of what layers keep in them. HostMemoryError
    if the budget has no room for two slices of each version, or the memory cannot be had.

    Attributes:
        limit: bytes that slots may take.
        refused: why not all of them are pinned, where there is a device.
        pools: by bit-width; ``tables`` say what layers keep in them.
        counts: since the start or the last reset.
        held: what is in slots, or comes.
        passing: that of it which no layer keeps, what was used last at the end.
        coming: that of it which is still read.
        orphans: slots that are in use, or written, by what was given up.
    """

    def __init__(
        self,
        experts: ModelExperts,
        nbytes: int,
        page_lock: CudaPageLock | None,
        engine: TransferEngine,
        shared: SharedMemory | None = None,  # memory for everything, which other processes have, too
    ) -> None:
        self.experts, self.counts, self._page_lock, self._engine = experts, HostCacheCounts(), page_lock, engine
        self.pools: dict[int, SlotPool] = {}
        self.tables: dict[int, Table] = {}
        self.held: dict[SliceKey, Held] = {}
        self.passing: OrderedDict[SliceKey, Held] = OrderedDict()
        self.coming: set[SliceKey] = set()
        self.orphans: list[Held] = []
        self.limit = 0
        self.refused: str | None = None
        self.make(nbytes, shared)

    def make(self, nbytes: int, shared: SharedMemory | None = None) -> None:
        sizes = {bits: whole_pages(fmt.nbytes) for bits, fmt in self.experts.formats.items()}
        least = smallest_host_cache(self.experts)
        if nbytes < least:
            raise HostMemoryError(
                f"host_memory is {nbytes} bytes, but two slices of each version need {least}; set host_memory to at "
                f"least {least} bytes"
            )
        count = min(len(self.experts.layers) * self.experts.num_experts, nbytes // sum(sizes.values()))
        needed, found = count * sum(sizes.values()), False
        if shared is not None:
            shared.begin(needed)
            found = shared.found
        if not found and (free := available_host_memory()) < needed:
            raise HostMemoryError(f"host_memory would be {nbytes} bytes, but {free} are free")
        self.limit, self.refused = nbytes, None
        arenas: list[Arena] = []
        try:
            for bits, each in sizes.items():
                most = max(1, _CHUNK // each)
                arenas = []
                for first in range(0, count, most):
                    arenas.append(arena := Arena(min(most, count - first) * each, self._page_lock, shared))
                    if not found:
                        arena.memory.fill_(0)  # so that it is there: a machine short of it would end the process later
                    self.refused = self.refused or arena.lock()
                self.pools[bits] = SlotPool(self.experts.formats[bits], arenas, slot_bytes=each)
                self.tables[bits] = _table(self.experts, count)
        except OSError as error:
            self.forget()
            for arena in arenas:
                arena.close()
            raise HostMemoryError(f"{nbytes} bytes of host memory could not be had ({error.strerror})") from error

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())

    @property
    def pinned(self) -> int:
        return sum(pool.pinned for pool in self.pools.values())

    def assign_all(self) -> list[Held]:
        """Give every slice a slot for good, and return them; there are as many slots as slices, all free."""
        for key in all_keys(self.experts):
            slot = self.pools[key.bits].take(kept=False)
            assert slot is not None
            self.held[key] = Held(key, slot, kept=True)
        return list(self.held.values())

    def take(self, other: "HostSlots") -> None:
        """Hold what another one has, where both hold everything; its layers come behind one's own."""
        behind = len(self.experts.layers) - len(other.experts.layers)
        for held in other.held.values():
            held.key = replace(held.key, layer=held.key.layer + behind)
            self.held[held.key] = held
        for bits, pool in other.pools.items():
            self.pools[bits].merge(pool)
        self.limit += other.limit

    @property
    def unbound(self) -> str | None:
        """Why some of it does not lie near the device; None if it does, or need not."""
        arenas = (arena for pool in self.pools.values() for arena in pool.arenas)
        return next((arena.unbound for arena in arenas if arena.unbound), None)

    def expect(self, layer: int, keys: list[SliceKey]) -> None:
        if any(key not in self.held for key in keys):
            self._drop_predictions(keys)
        for bits, table in self.tables.items():
            asked = sorted(key.expert for key in keys if key.bits == bits)
            if not asked:
                continue
            active = np.array(asked, np.int64)
            places = table.begin_step(layer, active, np.full(len(active), HIGH, np.int8))[0].tolist()
            for expert, place in zip(asked, places, strict=True):
                key = SliceKey(layer, expert, bits)
                held = self.held.get(key)
                self.counts.hits += held is not None
                self.counts.misses += held is None
                if held is not None and held.ticket is not None and held.ticket.reason is Reason.PREFETCH:
                    self._engine.demand(held.ticket)
                if held is not None:
                    self.counts.predictions.useful += held.prediction
                    held.prediction = False
                if place == HIT:
                    continue
                if place >= 0:
                    table.remove(layer, place)
                    self._release(self.held.pop(SliceKey(layer, place, bits)))
                if held is None and not self.begin(key, Reason.DEMAND):
                    continue
                held = self.held[key]
                if place != STREAM and not held.kept:
                    held.kept = True
                    del self.passing[key]
                    if held.ticket is None:
                        self._publish(held)

    def forget_predictions(self, layer: int) -> None:
        """What was predicted for a layer counts as such until then."""
        for key, held in self.passing.items():
            held.prediction &= key.layer != layer

    def use(self, key: SliceKey) -> bool:
        """Lend a slice that is there or comes, until ``leave``; whether there is a slot for it."""
        if key not in self.held and not self.begin(key, Reason.DEMAND):
            return False
        self.held[key].users += 1
        if key in self.passing:
            self.passing.move_to_end(key)
        return True

    def leave(self, held: Held) -> None:
        held.users -= 1
        self.collect()
        if held.dropped and not held.users:
            self.free(held)

    @property
    def stuck(self) -> bool:
        """No slot will come back but from reads that were given up."""
        return not self.coming and not any(held.users for held in (*self.held.values(), *self.orphans))

    def begin(self, key: SliceKey, reason: Reason) -> bool:
        """Start to read a slice, if there is a slot for it."""
        slot = self.pools[key.bits].take(kept=False) or self._reclaim(key.bits, predictions=reason is Reason.DEMAND)
        if slot is None:
            return False
        self.counts.predictions.made += reason is Reason.PREFETCH
        ticket = self._engine.submit(key, slot.packed, reason, slot.last_read)
        slot.last_read = None
        self.held[key] = self.passing[key] = Held(key, slot, ticket, prediction=reason is Reason.PREFETCH)
        self.coming.add(key)
        return True

    def _reclaim(self, bits: int, *, predictions: bool) -> Slot | None:
        """The slot of what passed, longest ago; one prediction does not push out another."""
        for key, held in self.passing.items():
            if key.bits == bits and not held.users and held.ticket is None and (predictions or not held.prediction):
                del self.passing[key], self.held[key]
                return held.slot
        return None

    def _drop_predictions(self, wanted: list[SliceKey]) -> None:
        for key in [key for key in self.coming if key not in wanted]:
            ticket = self.ticket(key)
            if ticket.reason is Reason.PREFETCH and not self.held[key].users:
                self.counts.predictions.dropped += self._engine.cancel(ticket)
        self.collect()

    def collect(self) -> None:
        """Take note of reads that have ended, and of slots that come back."""
        for key in list(self.coming):
            held, ticket = self.held[key], self.ticket(key)
            if not ticket.ended and not ticket.orphaned:
                continue
            self.coming.discard(key)
            if self._engine.arrived(ticket):
                held.ticket = None
                if held.kept:
                    self._publish(held)
                continue
            del self.held[key]
            self.passing.pop(key, None)
            self.orphans.append(held)
        for held in [held for held in self.orphans if held.ticket is not None and held.ticket.ended]:
            self.orphans.remove(held)
            held.ticket = None
            self._release(held)

    def _publish(self, held: Held) -> None:
        """Complete bytes get their row, unless the layer has filled its share meanwhile, because a step failed."""
        key = held.key
        table = self.tables[key.bits]
        if np.count_nonzero(table.precision[key.layer]) < table.quotas[key.layer, HIGH]:
            table.publish(key.layer, key.expert, Precision.HIGH, held.slot.index)
        else:
            held.kept, self.passing[key] = False, held

    def _release(self, held: Held) -> None:
        if held.users:
            held.dropped = True
            self.orphans.append(held)
        else:
            self.free(held)

    def free(self, held: Held) -> None:
        if held in self.orphans:
            self.orphans.remove(held)
        held.dropped = False
        self.pools[held.key.bits].give_back(held.slot, kept=False)

    def ticket(self, key: SliceKey) -> Ticket:
        ticket = self.held[key].ticket
        assert ticket is not None
        return ticket

    def forget(self) -> None:
        """Give the memory back; nothing may be read into it."""
        self.held.clear()
        self.passing.clear()
        self.coming.clear()
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()

    def check_integrity(self) -> None:
        """Between steps, assert: every slot is free or holds one slice, layers keep no more than their shares."""
        self.collect()
        assert self.nbytes <= self.limit
        assert self.passing.keys() == {key for key, held in self.held.items() if not held.kept}
        for bits, pool in self.pools.items():
            table = self.tables[bits]
            check_integrity(table)
            in_use = (held for held in (*self.held.values(), *self.orphans) if held.key.bits == bits)
            pool.check_integrity([held.slot.index for held in in_use])
            for layer, expert in table.residents(Precision.HIGH):
                held = self.held[SliceKey(layer, expert, bits)]
                assert held.slot.index == table.slot[0, layer, expert], "a row names another slot"
                assert held.kept, "a row names what passes"


def _table(experts: ModelExperts, count: int) -> Table:
    """Of what layers keep in so many slots."""
    layers, each = len(experts.layers), experts.num_experts
    table = Table.allocate(layers, each)
    passing = 0 if count == layers * each else max(_FEWEST, min(count // 8, experts.top_k * 4))
    quotas = layer_quotas(count, [1.0] * layers, min(passing, count), each)
    set_pools(table, {HIGH: (0, 0, count)}, {HIGH: quotas})
    return table
