"""The host-memory tier: slots with a hard byte budget, filled from disk.

It lies between the disk and a device with its own memory. If all slices fit, they are read at start and stay. Otherwise
the planner's rule decides which ones stay. It has a table of its own here, in which a use is a miss of the device: so
experts that are resident on the device lose score here, and make room for others. A transfer engine of its own reads
from the disk, as many slices at the same time as is fastest.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from vllm_dymoe.cache.expert_cache import Fetch
from vllm_dymoe.cache.host_slots import HostSlots, check_free
from vllm_dymoe.cache.pages import available_host_memory
from vllm_dymoe.cache.slots import Slot
from vllm_dymoe.cache.store import DamagedStoreError, FileStore, HostMemoryError, HostStore, StoreError
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.store.shared import SharedMemory
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import Ticket, TransferError
from vllm_dymoe.cgroups import cores_of_process, usable_cores
from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, SliceKey
from vllm_dymoe.units import size

_POLL_SECONDS = 1e-3  # poll interval if more slices are requested at once than there are slots


class _DiskDelivery(CpuDelivery):
    """Delivers from files into slots of host memory.

    A slot is overwritten only after the device's last copy out of it.
    """

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        if ticket.after is not None and projections.start == 0:
            ticket.after.synchronize()
        super().deliver(ticket, projections, destination, wait=wait)


class HostCache(HostStore):
    """A store that keeps slices in host memory within a budget, others in files.

    HostMemoryError if the budget has no room for two slices of each version, or if memory cannot be allocated.

    Args:
        nbytes: budget of host memory, a hard limit.
        timeout: seconds to wait for a read; None for no limit.
        shared: its memory, if other processes share it; it has room for everything, and ``fill`` must be called next.
        fills: ``fill`` is called next, so memory need not be touched before.
    """

    def __init__(
        self,
        files: FileStore,
        nbytes: int,
        pinner: CudaPinner | None = None,
        timeout: float | None = None,
        shared: SharedMemory | None = None,
        *,
        fills: bool = False,
    ) -> None:
        self.experts, self.files, self._pinner, self._shared = files.experts, files, pinner, shared
        self.engine = TransferEngine(_DiskDelivery(files), files.depth, timeout=timeout, waiters_move=False)
        try:
            self.slots = HostSlots(self.experts, nbytes, pinner, self.engine, shared, touches=not fills)
        except BaseException:
            self.engine.close()
            _unshare(shared)
            raise
        self._changed = threading.Condition()  # held for everything about slots
        self._expected: set[SliceKey] = set()  # slices of the running layer, whose uses are counted

    @property
    def occupies_cores(self) -> bool:
        return self.whole or self.files.occupies_cores

    @property
    def readable(self) -> bool:
        return self.whole and (self._pinner is None or self.slots.pinned == self.slots.nbytes)

    @property
    def description(self) -> str:
        slots, where = self.slots, "not pinned: there is no CUDA device"
        if self._pinner is not None:
            where = "pinned"
            if slots.pinned < slots.nbytes:
                where = f"{size(slots.pinned)} of it pinned, the rest behind staging buffers: {slots.refused}"
            if self._pinner.node is not None:
                near = "on" if slots.unbound is None else "not near the GPU on"
                where += f", {near} NUMA node {self._pinner.node}{f' ({slots.unbound})' if slots.unbound else ''}"
        said = f"{size(slots.nbytes)} of host memory ({where}{', shared by ranks' if self._shared is not None else ''})"
        if self.whole:
            return said
        count = sum(pool.count for pool in slots.pools)
        every = len(self.experts.layers) * self.experts.num_experts * len(slots.pools)
        return f"{said} for {count} of {every} slices, over {self.files.description}"

    def packed(self, key: SliceKey) -> torch.Tensor:
        return self.slots.held[key].slot.packed

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        with self.hold(key, projections, wait=wait) as slot:
            destination.copy_(slot.packed[self.experts.format(key).span(projections)])

    def hold(
        self, key: SliceKey, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> contextlib.AbstractContextManager[Slot]:
        """Lend a slice, see the base class; misses are requested.

        The first projection counts as a use unless ``expect`` counted it.
        """
        if self.whole:
            return contextlib.nullcontext(self.slots.held[key].slot)
        return self._hold(key, projections, wait)

    # -- requests of steps ---------------------------------------------------------------------

    def expect(self, layer: int, keys: list[SliceKey]) -> None:
        """Decide which slices stay, and start all reads of a layer.

        ``keys`` are the slices that a layer's step needs and the device lacks.
        """
        with self._changed:
            self._expected = set(keys)
            self.slots.collect()
            self.slots.expect(layer, keys)

    def keeps(self, key: SliceKey) -> bool:
        """Return whether a layer keeps a slice where a device can read it.

        The slice is in its slot, or on its way there.
        """
        with self._changed:
            held = self.slots.held.get(key)
            return held is not None and held.kept and (self._pinner is None or held.slot.pinned)

    @contextlib.contextmanager
    def _hold(self, key: SliceKey, projections: range, wait: bool) -> Iterator[Slot]:
        held = self._arrive(key, wait, first=projections.start == 0)
        try:
            yield held.slot
        finally:
            self._leave(held)

    def _arrive(self, key: SliceKey, wait: bool, first: bool) -> Fetch:
        held = self._use(key, wait, first)
        if held.complete:
            return held
        try:
            if not wait and not self.engine.arrived(held.ticket):
                raise BlockingIOError("the read would have to wait for a disk")
            self.engine.wait(held.ticket)
        except BaseException as error:
            self._leave(held)
            if isinstance(error, TransferError):
                raise StoreError(str(error)) from error
            raise
        return held

    def _use(self, key: SliceKey, wait: bool, first: bool) -> Fetch:
        with self._changed:
            self.slots.collect()
            if first and key not in self._expected:
                self.slots.expect(key.layer, [key])
            while not self.slots.use(key):
                if not wait:
                    raise BlockingIOError("every slot is in use")
                if self.slots.stuck:
                    raise StoreError("every slot of host memory waits for a read that has not ended; check the disk.")
                self._changed.wait(_POLL_SECONDS)
                self.slots.collect()
            return self.slots.held[key]

    def _leave(self, held: Fetch) -> None:
        with self._changed:
            self.slots.leave(held)
            self._changed.notify_all()

    # -- lifecycle ------------------------------------------------------------------------------

    def fill(self, progress: Callable[[int], object] = lambda nbytes: None) -> None:
        """Read and verify all slices; there must be room for them.

        Raises StoreError if files cannot be read; the store is then closed. ``progress`` is called with each number of
        bytes read.
        """
        try:
            self._read_all(progress)
        except BaseException:
            self.close()
            raise

    def _read_all(self, progress: Callable[[int], object] = lambda nbytes: None) -> None:
        found = self._shared is not None and self._shared.found

        def read(fetch: Fetch) -> int:
            key, packed = fetch.ticket.key, fetch.slot.packed
            if found:
                self._check_found(key, packed)
            else:
                self.files.read_into(key, packed)
            return packed.numel()

        there = self.slots.assign_all()
        with self.files.reading_all(), self._threads() as pool:
            for nbytes in pool.map(read, there):
                progress(nbytes)
        if self._shared is not None:
            self._shared.publish()
        self.slots.publish_all()
        self.whole = True

    def _threads(self) -> ThreadPoolExecutor:
        """Return threads that keep disk and cores busy while everything is read.

        Reading and verifying both release the interpreter lock, so threads help even if the files are in memory.
        """
        cores = cores_of_process()
        threads = max(self.files.depth, min(8, usable_cores(len(cores))))
        return ThreadPoolExecutor(threads, initializer=os.sched_setaffinity, initargs=(0, cores))

    def _check_found(self, key: SliceKey, packed: torch.Tensor) -> None:
        """Verify a slice that another process has filled, by the store's checksums."""
        try:
            self.files.check(key, packed)
        except DamagedStoreError as error:
            raise StoreError(
                f"another process of this user shares a copy of the experts in memory that differs from the store in "
                f"{self.files.folder}; stop that process and start again."
            ) from error

    def resize(self, nbytes: int) -> None:
        """Change the budget; all slots are empty afterwards. No step may be running.

        HostMemoryError if there is no room for two slices of each version, or no memory; then the old budget stays.
        """
        self.check_resize(nbytes)
        before = self.slots.limit
        with self._changed:
            self.sleep()
            self.whole, self._shared = False, None
            try:
                self._make_slots(nbytes)
            except HostMemoryError:
                self._make_slots(before)
                raise

    def check_resize(self, nbytes: int) -> None:
        """Raise HostMemoryError if there is no room for another budget; nothing changes."""
        freed = 0 if self._shared is not None else self.slots.nbytes
        check_free(self.experts, nbytes, available_host_memory() + freed)

    def _make_slots(self, nbytes: int, shared: SharedMemory | None = None, *, fills: bool = False) -> None:
        given = self.experts, nbytes, self._pinner, self.engine, shared, self.slots.counts
        self.slots = HostSlots(*given, touches=not fills)

    def sleep(self) -> None:
        """Free the memory until ``wake``; no step may be running.

        Raises HostMemoryError while reads have not ended.
        """
        with self._changed:
            if not self.slots.settle():
                raise HostMemoryError("host_memory cannot change while reads have not ended; check the disk")
            self.slots.close()
            _unshare(self._shared)

    def wake(self) -> None:
        """Allocate as much memory as before.

        It is filled if it held all slices before, and otherwise empty. Errors are as at start; after one the memory is
        free again, and ``wake`` may be called again.
        """
        try:
            with self._changed:
                self._make_slots(self.slots.limit, self._shared if self.whole else None, fills=self.whole)
            if self.whole:
                self._read_all()
        except BaseException:
            self.slots.close()
            _unshare(self._shared)
            raise

    def take(self, other: HostStore, experts: ModelExperts) -> None:
        """Append another store, with the host memory of both; see the base class.

        All slots are empty afterwards, except if both stores hold all of their slices. No step may be running.
        """
        limit, self.experts = self.slots.limit, experts
        if isinstance(other, HostCache) and self.whole and other.whole:
            other.engine.close()
            self.files.take(other.files, experts)
            self.slots.take(other.slots, experts)
            return
        if isinstance(other, HostCache):
            limit, other = limit + other.slots.limit, other.release()
        self.files.take(other, experts)
        self.resize(limit)

    def release(self) -> FileStore:
        """Stop reads and free the memory; return the files."""
        self.engine.close()
        self.slots.close()
        _unshare(self._shared)
        return self.files

    def reset_stats(self) -> None:
        self.slots.reset_counts()
        self.engine.reset_stats()

    def close(self) -> None:
        self.release().close()

    def check_integrity(self) -> None:
        with self._changed:
            self.slots.check_integrity()


def _unshare(shared: SharedMemory | None) -> None:
    if shared is not None:
        shared.close()


def join(model: HostStore, draft: HostStore) -> HostStore:
    """Return one store of a model and its draft, with the draft's layers last.

    If both have a layer of the same index, the draft's indices continue after the model's highest.
    """
    mine, drafted = model.experts.layers, draft.experts.layers
    shift = max(mine) + 1 if set(mine) & set(drafted) else 0
    layers = (*mine, *(layer + shift for layer in drafted))
    own = dict(model.experts.own)
    for layer, formats in zip(drafted, draft.experts.of_layers, strict=True):
        if formats != model.experts.formats:
            (own[layer + shift],) = formats.values()
    experts = replace(model.experts, layers=layers, draft_layers=len(drafted), own=own)
    if isinstance(draft, HostCache) and not isinstance(model, HostCache):
        draft = draft.release()
    model.take(draft, experts)
    return model
