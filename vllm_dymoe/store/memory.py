"""Packed experts in host memory, page-locked where there is a device to copy them: whether they fit, and filling it."""

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from vllm_dymoe.config import AUTO, ExpertBudget
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

    depth, occupies_cores = 1, True

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
        self.depth = max(model.depth, draft.depth)
        self.occupies_cores = model.occupies_cores or draft.occupies_cores
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


def slot_bytes(nbytes: int) -> int:
    """Of a slice in a slot of host memory: whole pages, so that a disk writes straight into it."""
    return whole_pages(nbytes)


def smallest_level(experts: ModelExperts) -> int:
    """The smallest budget of a level in host memory: two slices of each version, one read from while another fills."""
    return 2 * sum(slot_bytes(fmt.nbytes) for fmt in experts.formats.values())


def whole_level(experts: ModelExperts) -> int:
    """The budget of a level that holds everything."""
    return len(experts.layers) * experts.num_experts * sum(slot_bytes(fmt.nbytes) for fmt in experts.formats.values())


@dataclass(frozen=True)
class HostPlace:
    """Where packed experts live, and why.

    Attributes:
        pinned: all in host memory, page-locked where there is a CUDA device; otherwise in files.
        reason: a remark for people.
        level: bytes of host memory for some of them, beside the files.
    """

    pinned: bool
    reason: str = ""
    level: int = 0


@dataclass(frozen=True)
class HostRoom:
    """What one rank may use.

    Attributes:
        available: bytes of host memory that all ranks on this machine can get.
        ranks: on this machine.
        wanted: the option ``host_memory``.
        taken: bytes of it that another model's experts have on this rank.
        separate: the device has memory of its own, real or emulated, beside which host memory is a level.
    """

    available: int
    ranks: int = 1
    wanted: ExpertBudget = AUTO
    taken: int = 0
    separate: bool = True

    def limit(self, experts: ModelExperts) -> int | None:
        """Bytes that the user allows; None if that is left to us.

        Raises:
            HostMemoryError: they are more than there are: the machine would swap, or end the process.
        """
        limit = host_memory_bytes(self.wanted, experts)
        if limit is not None and limit - self.taken > self.available // self.ranks:
            raise HostMemoryError(
                f"host_memory is {limit} bytes on each of {self.ranks} ranks, but {self.available // self.ranks} are "
                'available to each; lower host_memory, or leave it "auto"'
            )
        return None if limit is None else max(0, limit - self.taken)


def host_memory_bytes(wanted: ExpertBudget, experts: ModelExperts) -> int | None:
    """Bytes that the option ``host_memory`` means; None for "auto"."""
    return int(wanted.share * experts.stored_nbytes) if wanted.share is not None else wanted.bytes


def choose_host_place(asked: str, device_type: str, experts: ModelExperts, room: HostRoom) -> HostPlace:
    """Choose for one rank; HostMemoryError if memory was asked for, and has no room for the experts.

    Args:
        asked: the option ``host_store``: "auto", "file" or "pinned".
    """
    if asked == "file":
        return HostPlace(False)
    needed, available, limit = memory_bytes(experts), room.available, room.limit(experts)
    each = f" on each of {room.ranks} ranks" if room.ranks > 1 else ""
    if asked == "pinned":
        mine = available // room.ranks if limit is None else limit
        if needed > mine:
            raise HostMemoryError(
                f'host_store = "pinned" needs {needed} bytes of host memory{each}, but {mine} are available'
                f'{" to each" if each else ""}; free {needed - mine} more, or use host_store = "file"'
                f"{_fewer_bits(experts, mine)}."
            )
        return HostPlace(True)
    if device_type != "cuda" and (limit is None or not room.separate):
        return HostPlace(False, "auto: there is no CUDA device" if limit is None else "host_memory is the budget, too")
    left = max(_LEAST_LEFT, available // _SHARE_LEFT)
    told = f"host_memory is {size(limit or 0)}"
    if limit is None:
        limit = max(0, available - left) // room.ranks
        told = f"auto: {size(available)} of host memory are available, of which {size(left)} are left to others"
    if needed <= limit:
        return HostPlace(True, f"{told}; all take {size(needed)}{each}")
    if limit < smallest_level(experts):
        return HostPlace(False, f"{told}; not enough for a level between device and files")
    return HostPlace(False, f"{told}; all would take {size(needed)}{each}", limit)


def _fewer_bits(experts: ModelExperts, room: int) -> str:
    """The largest single version that fits, as a remark; nothing if none does."""
    stored = max(experts.formats)
    for bits in (8, 4, 2):
        formats = {bits: replace(experts.formats[stored], code=code_of(bits))}
        if bits < stored and (taken := memory_bytes(replace(experts, formats=formats))) <= room:
            return f", or hi = {bits} and lo = 0, which take {taken}"
    return ""
