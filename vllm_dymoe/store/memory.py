"""Packed experts in host memory, page-locked where there is a device to copy them."""

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_dymoe.host_memory import available_host_memory, whole_pages
from vllm_dymoe.residency.format import EVERY_PROJECTION, BlobKey, ModelExperts, layer_keys
from vllm_dymoe.store.base import HostMemoryError
from vllm_dymoe.store.files import FileStore
from vllm_dymoe.store.page_lock import Arena, PageLock


class MemoryStore:
    """Blobs in host memory, one mapping for each layer, page-locked where there is a device to copy to.

    Args:
        page_lock: locks the memory of a layer once it is filled; None without a device.

    Raises:
        HostMemoryError: the memory cannot be had.
    """

    def __init__(self, experts: ModelExperts, page_lock: PageLock | None = None) -> None:
        self.experts = experts
        self._page_lock = page_lock
        self._arenas: list[Arena] = []
        self._blobs: list[dict[int, torch.Tensor]] = []
        needed = memory_bytes(experts)
        available = available_host_memory()
        if available < needed:
            raise HostMemoryError(f"the experts need {needed} bytes of host memory, but {available} are available")
        blobs = [place for place in experts.places.values() if place.start == 0]
        sizes = [experts.num_experts * blob.stride for blob in blobs]
        try:
            for _ in experts.layers:
                self._arenas.append(Arena(sum(sizes), page_lock))
                parts = zip(blobs, self._arenas[-1].memory.split(sizes), strict=True)
                by_bits = {blob.bits: part.view(experts.num_experts, -1) for blob, part in parts}
                self._blobs.append(
                    {
                        bits: by_bits[place.bits].narrow(1, place.start, experts.formats[bits].nbytes)
                        for bits, place in experts.places.items()
                    }
                )
        except OSError as error:
            self.close()
            raise HostMemoryError(
                f"the experts need {needed} bytes of host memory, which could not be had ({error.strerror})"
            ) from error

    @property
    def description(self) -> str:
        """The kind of memory."""
        if self._page_lock is None:
            return "host memory (not page-locked: there is no CUDA device)"
        node, unbound = self._page_lock.node, next((arena.unbound for arena in self._arenas if arena.unbound), None)
        if unbound is not None:
            return f"page-locked host memory, not near the GPU on NUMA node {node} ({unbound})"
        return "page-locked host memory" + ("" if node is None else f" on NUMA node {node}")

    def blob(self, key: BlobKey, projections: range = EVERY_PROJECTION) -> torch.Tensor:
        """The bytes themselves: uint8 [bytes of the projections]."""
        blob = self._blobs[key.layer][key.bits][key.expert]
        if len(projections) == len(EVERY_PROJECTION):
            return blob
        return blob[self.experts.formats[key.bits].span(projections)]

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        destination.copy_(self.blob(key, projections))

    def take(self, other: "MemoryStore", experts: ModelExperts) -> None:
        """Hold the layers of another store, too, behind one's own; the other has none then."""
        self.experts = experts
        self._arenas += other._arenas
        self._blobs += other._blobs
        other._arenas, other._blobs = [], []

    def close(self) -> None:
        """Unlock the memory and let it go."""
        self._blobs.clear()
        while self._arenas:
            self._arenas.pop().close()

    @classmethod
    def from_files(
        cls, source: FileStore, page_lock: PageLock | None = None, progress: Callable[[int], object] = lambda _: None
    ) -> "MemoryStore":
        """Read a whole file store into memory, layer by layer, and lock it.

        Args:
            source: the files; each section is compared with its checksum.
            progress: called with the bytes of each blob that was read.

        Raises:
            HostMemoryError: the memory cannot be had, or not be locked.
            StoreError: the files cannot be read. Nothing stays locked.
        """
        store = cls(source.experts, page_lock)

        def fill(key: BlobKey) -> int:
            source.read_into(key, store.blob(key))
            return store.experts.formats[key.bits].nbytes

        try:
            # Reading and checking both leave the interpreter: threads are worth it even where the files are in memory.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                for layer in range(len(source.experts.layers)):
                    for nbytes in pool.map(fill, layer_keys(source.experts, layer)):
                        progress(nbytes)
                    store._lock(layer)
        except BaseException:
            store.close()
            raise
        return store

    def _lock(self, layer: int) -> None:
        reason = self._arenas[layer].lock()
        if reason is not None:
            raise HostMemoryError(
                f"the experts need {memory_bytes(self.experts)} bytes of page-locked host memory, and locking failed "
                f"at layer {self.experts.layers[layer]} ({reason}){_locked_limit()}"
            )


def memory_bytes(experts: ModelExperts) -> int:
    """Bytes of host memory that a :class:`MemoryStore` takes: whole pages for each layer."""
    layer = sum(experts.num_experts * fmt.nbytes for fmt in experts.formats.values())
    return len(experts.layers) * whole_pages(layer)


def _locked_limit() -> str:
    """The limit on locked memory, as a remark; nothing if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f", the limit on locked memory (ulimit -l) is {limit} bytes"
