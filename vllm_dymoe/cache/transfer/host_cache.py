"""Host memory as a level: slots in an arena with a hard budget, between the disk and a device with memory of its own.

Where all slices fit they are read at start, and stay. Otherwise the device's rule decides what stays, over a table of
the level's own whose uses are the device's misses: what the device keeps cools down here and makes room for what it
does not. Reads are tickets of an engine of the level's own, as many at once as the disk wants. A prediction takes a
slot that no layer keeps, and is dropped when anything is in demand.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from vllm_dymoe.cache.pages import usable_cores
from vllm_dymoe.cache.store import DamagedStoreError, FileStore, HostMemoryError, HostStore, StoreError
from vllm_dymoe.cache.store.page_lock import CudaPageLock
from vllm_dymoe.cache.store.shared import SharedMemory
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.host_reads import HostReads
from vllm_dymoe.cache.transfer.host_slots import Held, HostCacheCounts, HostSlots
from vllm_dymoe.cache.transfer.ticket import Ticket, TransferStats
from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, SliceKey
from vllm_dymoe.units import size


class _DiskDelivery(CpuDelivery):
    """From the files into slots of the level, behind the device's last copy out of them."""

    def __init__(self, files: FileStore) -> None:
        super().__init__(files)
        self.synchronize: Callable[[Any], None] = lambda event: None

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        if ticket.after is not None and projections.start == 0:
            self.synchronize(ticket.after)
        super().deliver(ticket, projections, destination, wait=wait)


class HostCache(HostStore):
    """A store whose slices are in host memory as far as a budget goes, and in files otherwise. HostMemoryError if the
    budget has no room for two slices of each version, or the memory cannot be had.

    Args:
        nbytes: of host memory, a hard limit.
        timeout: seconds that a read is waited for; None for ever.
        shared: its memory, if other processes have the same; there is room for everything, and ``fill`` is next.

    Attributes:
        delivery: its ``synchronize`` is set where copies out of slots are asynchronous.
    """

    def __init__(
        self,
        files: FileStore,
        nbytes: int,
        page_lock: CudaPageLock | None = None,
        timeout: float | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        self.experts, self.files, self._page_lock, self._shared = files.experts, files, page_lock, shared
        self.delivery = _DiskDelivery(files)
        self.engine = TransferEngine(self.delivery, files.depth, timeout=timeout, waiters_move=False)
        try:
            self.slots = HostSlots(files.experts, nbytes, page_lock, self.engine, shared)
        except BaseException:
            self.engine.close()
            _unshare(shared)
            raise
        self.reads = HostReads(self.slots, self.engine)

    @property
    def occupies_cores(self) -> bool:
        return self.whole or self.files.occupies_cores

    @property
    def readable(self) -> bool:
        return self.whole and (self._page_lock is None or self.slots.pinned == self.slots.nbytes)

    @property
    def description(self) -> str:
        slots, where = self.slots, "not pinned: there is no CUDA device"
        if self._page_lock is not None:
            where = "pinned"
            if slots.pinned < slots.nbytes:
                where = f"{size(slots.pinned)} of it pinned, the rest behind staging buffers: {slots.refused}"
            if self._page_lock.node is not None:
                near = "on" if slots.unbound is None else "not near the GPU on"
                where += f", {near} NUMA node {self._page_lock.node}{f' ({slots.unbound})' if slots.unbound else ''}"
        said = f"{size(slots.nbytes)} of host memory ({where}{', shared by ranks' if self._shared is not None else ''})"
        if self.whole:
            return said
        count = sum(len(pool.slots) for pool in slots.pools.values())
        every = len(self.experts.layers) * self.experts.num_experts * len(slots.pools)
        return f"{said} for {count} of {every} slices, over {self.files.description}"

    def packed(self, key: SliceKey) -> torch.Tensor:
        return self.slots.held[key].packed

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        with self.hold(key, projections, wait=wait) as held:
            destination.copy_(held.packed[self.experts.formats[key.bits].span(projections)])

    def hold(
        self, key: SliceKey, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> contextlib.AbstractContextManager[Held]:
        """With the first projection it is used, if ``expect`` has not said so; what is not there is asked for."""
        if self.whole:
            return contextlib.nullcontext(self.slots.held[key])
        return self.reads.hold(key, projections, wait)

    def fill(self, progress: Callable[[int], object] = lambda nbytes: None) -> None:
        """Read and check everything, telling the bytes that have come; there has to be room for it. Closed if the files
        cannot be read (StoreError)."""

        found = self._shared is not None and self._shared.found

        def read(held: Held) -> int:
            assert held.key is not None
            if found:
                self._check_found(held.key, held.packed)
            else:
                self.files.read_into(held.key, held.packed)
            return held.packed.numel()

        there = self.slots.assign_all()
        try:
            # Reading and checking both leave the interpreter: threads are worth it even where the files are in memory.
            with ThreadPoolExecutor(max(self.files.depth, min(8, usable_cores()))) as pool:
                for nbytes in pool.map(read, there):
                    progress(nbytes)
            if self._shared is not None:
                self._shared.publish()
        except BaseException:
            self.close()
            raise
        self.whole = True

    def _check_found(self, key: SliceKey, packed: torch.Tensor) -> None:
        """Compare what another process has filled with the store's checksums."""
        try:
            self.files.check(key, packed)
        except DamagedStoreError as error:
            raise StoreError(
                f"the copy of the experts in {self.files.folder} that another process of this user has in memory is "
                "not what the store holds; end that process, and start again."
            ) from error

    def resize(self, nbytes: int) -> None:
        """Another budget; the level is empty afterwards. No step may be running. HostMemoryError if it has no room for
        two slices of each version, or cannot be had; the old one stays."""
        before = self.slots.limit
        with self.reads.changed:
            self.sleep()
            self.whole, self._shared = False, None
            try:
                self.slots.make(nbytes)
            except HostMemoryError:
                self.slots.make(before)
                raise

    def sleep(self) -> None:
        """Give the memory back until ``wake``. No step may be running; HostMemoryError while reads have not ended."""
        with self.reads.changed:
            for key in list(self.slots.coming):
                self.engine.cancel(self.slots.ticket(key))
            if (
                not all(self.engine.settle(self.slots.ticket(key)) for key in list(self.slots.coming))
                or self.slots.orphans
            ):
                raise HostMemoryError("host_memory cannot change while reads have not ended; check the disk")
            for held in self.slots.held.values():
                if held.last_read is not None:
                    self.delivery.synchronize(held.last_read)
            self.slots.forget()
            _unshare(self._shared)

    def wake(self) -> None:
        """Have as much memory as before, with everything in it if it was whole, else empty; errors as at start."""
        try:
            with self.reads.changed:
                self.slots.make(self.slots.limit, self._shared if self.whole else None)
        except BaseException:
            _unshare(self._shared)
            raise
        if self.whole:
            self.fill()

    def take(self, other: HostStore, experts: ModelExperts) -> None:
        """As a store, with the host memory of both; empty unless both are whole. No step may be running."""
        limit, self.experts, self.slots.experts = self.slots.limit, experts, experts
        if isinstance(other, HostCache) and self.whole and other.whole:
            other.engine.close()
            self.files.take(other.files, experts)
            self.slots.take(other.slots)
            return
        if isinstance(other, HostCache):
            limit, other = limit + other.slots.limit, other.release()
        self.files.take(other, experts)
        self.resize(limit)

    def release(self) -> FileStore:
        """End the reads and give the memory back; returns the files."""
        self.engine.close()
        self.slots.forget()
        _unshare(self._shared)
        return self.files

    def reset_stats(self) -> None:
        self.slots.counts, self.engine.stats = HostCacheCounts(), TransferStats()

    def close(self) -> None:
        self.release().close()

    def check_integrity(self) -> None:
        with self.reads.changed:
            self.slots.check_integrity()


def _unshare(shared: SharedMemory | None) -> None:
    if shared is not None:
        shared.close()


def join(model: HostStore, draft: HostStore) -> HostStore:
    """One store of both, the draft's layers last; those whose indices are the model's count on from its highest."""
    mine, drafted = model.experts.layers, draft.experts.layers
    shift = max(mine) + 1 if set(mine) & set(drafted) else 0
    layers = (*mine, *(layer + shift for layer in drafted))
    experts = replace(model.experts, layers=layers, draft_layers=len(drafted))
    if isinstance(draft, HostCache) and not isinstance(model, HostCache):
        draft = draft.release()
    model.take(draft, experts)
    return model
