"""Packed experts in host memory, page-locked where there is a device to copy them: whether they fit, and filling it."""

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from vllm_dymoe.host_memory import available_host_memory, whole_pages
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import EVERY_PROJECTION, BlobKey, ModelExperts, layer_keys
from vllm_dymoe.store.base import HostMemoryError, HostStore
from vllm_dymoe.store.files import FileStore
from vllm_dymoe.store.page_lock import Arena, CudaPageLock
from vllm_dymoe.units import size

# What stays free under host_store = "auto": page-locked memory cannot be swapped, and other processes need some.
_SHARE_LEFT = 10
_LEAST_LEFT = 2 << 30


class MemoryStore:
    """Blobs in host memory, one mapping for each layer, locked once it is filled; without a device it is not locked.

    Raises:
        HostMemoryError: the memory cannot be had.
    """

    def __init__(self, experts: ModelExperts, page_lock: CudaPageLock | None = None) -> None:
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
        if self._page_lock is None:
            return "host memory (not page-locked: there is no CUDA device)"
        node, unbound = self._page_lock.node, next((arena.unbound for arena in self._arenas if arena.unbound), None)
        if unbound is not None:
            return f"page-locked host memory, not near the GPU on NUMA node {node} ({unbound})"
        return "page-locked host memory" + ("" if node is None else f" on NUMA node {node}")

    def blob(self, key: BlobKey, projections: range = EVERY_PROJECTION) -> torch.Tensor:
        blob = self._blobs[key.layer][key.bits][key.expert]
        if len(projections) == len(EVERY_PROJECTION):
            return blob
        return blob[self.experts.formats[key.bits].span(projections)]

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        destination.copy_(self.blob(key, projections))

    def take(self, other: "MemoryStore", experts: ModelExperts) -> None:
        """Move the layers of another store behind one's own."""
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
        cls,
        source: FileStore,
        page_lock: CudaPageLock | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> "MemoryStore":
        """Read a whole file store into memory, layer by layer, check and lock it; on errors nothing stays locked."""
        store = cls(source.experts, page_lock)

        def fill(key: BlobKey) -> int:
            source.read_into(key, store.blob(key))
            return store.experts.formats[key.bits].nbytes

        try:
            # Reading and checking both leave the interpreter: threads are worth it even where the files are in memory.
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
                for layer, (index, arena) in enumerate(zip(source.experts.layers, store._arenas, strict=True)):
                    for nbytes in pool.map(fill, layer_keys(source.experts, layer)):
                        progress(nbytes)
                    if (reason := arena.lock()) is not None:
                        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                        raise HostMemoryError(
                            f"the experts need {memory_bytes(store.experts)} bytes of page-locked host memory, and "
                            f"locking failed at layer {index} ({reason})"
                            + f", the limit on locked memory (ulimit -l) is {limit} bytes"
                            * (limit != resource.RLIM_INFINITY)
                        )
        except BaseException:
            store.close()
            raise
        return store


class JoinedStore:
    """The layers of a model's store, and behind them those of its draft's, in the same formats."""

    def __init__(self, model: HostStore, draft: HostStore, experts: ModelExperts) -> None:
        self.experts = experts
        self.description = f"{model.description}, for the draft {draft.description}"
        self._stores = model, draft

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        drafted = key.layer - len(self._stores[0].experts.layers)
        store, layer = (self._stores[0], key.layer) if drafted < 0 else (self._stores[1], drafted)
        store.read_into(replace(key, layer=layer), destination, projections, wait=wait)

    def close(self) -> None:
        for store in self._stores:
            store.close()


def join(model: HostStore, draft: HostStore) -> HostStore:
    """One store of both, the draft's layers last; memory stays memory, and a device copies from it directly.

    A draft's layers whose indices are the model's count on from its highest.
    """
    mine, drafted = model.experts.layers, draft.experts.layers
    shift = max(mine) + 1 if set(mine) & set(drafted) else 0
    layers = (*mine, *(layer + shift for layer in drafted))
    experts = replace(model.experts, layers=layers, draft_layers=len(drafted))
    if isinstance(model, MemoryStore) and isinstance(draft, MemoryStore):
        model.take(draft, experts)
        return model
    return JoinedStore(model, draft, experts)


def memory_bytes(experts: ModelExperts) -> int:
    """Bytes of host memory that a :class:`MemoryStore` takes: whole pages for each layer."""
    layer = sum(experts.num_experts * fmt.nbytes for fmt in experts.formats.values())
    return len(experts.layers) * whole_pages(layer)


@dataclass(frozen=True)
class HostPlace:
    """Where packed experts live: in memory, page-locked where there is a CUDA device, or in files; and why."""

    pinned: bool
    reason: str = ""


def choose_host_place(asked: str, device_type: str, experts: ModelExperts, available: int, ranks: int) -> HostPlace:
    """Choose for one rank; HostMemoryError if memory was asked for, and has no room for the experts.

    Args:
        asked: the option ``host_store``: "auto", "file" or "pinned".
        available: bytes of host memory that all ranks on this machine can get.
    """
    if asked == "file":
        return HostPlace(False)
    needed = memory_bytes(experts)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    if asked == "pinned":
        room = available // ranks
        if needed > room:
            raise HostMemoryError(
                f'host_store = "pinned" needs {needed} bytes of host memory{each}, but {room} are available'
                f'{" to each" if each else ""}; free {needed - room} more, or use host_store = "file"'
                f"{_fewer_bits(experts, room)}."
            )
        return HostPlace(True)
    if device_type != "cuda":
        return HostPlace(False, "auto: there is no CUDA device")
    left = max(_LEAST_LEFT, available // _SHARE_LEFT)
    room = max(0, available - left) // ranks
    told = f"{size(available)} of host memory are available, of which {size(left)} are left to others"
    if needed > room:
        return HostPlace(False, f"auto: page-locked memory would take {size(needed)}{each}, {told}")
    return HostPlace(True, f"auto: {size(needed)}{each}, {told}")


def _fewer_bits(experts: ModelExperts, room: int) -> str:
    """The largest single version that fits, as a remark; nothing if none does."""
    stored = max(experts.formats)
    for bits in (8, 4, 2):
        formats = {bits: replace(experts.formats[stored], code=code_of(bits))}
        if bits < stored and (taken := memory_bytes(replace(experts, formats=formats))) <= room:
            return f", or hi = {bits} and lo = 0, which take {taken}"
    return ""
