"""The host store: every expert's packed bytes, outside the device.

One safetensors file per MoE layer holds a ``uint8 [experts, blob bytes]`` tensor
for each bit-width and, beside it, the checksum of every section. The manifest
``dymoe_experts.json`` describes them and is written last, so a folder with a
manifest is complete. Byte offsets: docs/format.md.
"""

import ctypes
import errno
import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from vllm_dymoe.experts.errors import ErrorRecord
from vllm_dymoe.experts.layout import EVERY_PROJECTION, ExpertFormat, ModelExperts, Projection
from vllm_dymoe.experts.mapping import whole_pages
from vllm_dymoe.experts.memory import available_host_memory
from vllm_dymoe.experts.page_lock import Arena, PageLock

MANIFEST = "dymoe_experts.json"
STORE_VERSION = 4
_NOTHING: frozenset[int] = frozenset()


class StoreError(RuntimeError):
    """A store that cannot be read or written; the message names the file and what to do."""


class HostMemoryError(StoreError):
    """Host memory that cannot be had or be locked; the message says why, and whoever asked for it what else to do."""


@dataclass(frozen=True, slots=True)
class BlobKey:
    """One version of one expert: position of its layer, local index, bit-width."""

    layer: int
    expert: int
    bits: int


class HostStore(Protocol):
    """Reads blobs. Implementations are safe to call from several threads."""

    experts: ModelExperts

    @property
    def description(self) -> str:
        """Where the bytes lie, for the line printed at start."""
        ...

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        """Copy one blob, or neighbouring projections of it, into host memory.

        Args:
            key: which blob.
            destination: uint8 [bytes of the projections], contiguous.
            projections: which of its projections.
            wait: for a disk, if need be.

        Raises:
            StoreError: the bytes cannot be read, or are not what was written.
            BlockingIOError: without ``wait``, they are not in memory; ``destination`` may be half-written.
        """
        ...

    def close(self) -> None:
        """Give files and memory back."""
        ...


def file_name(layer_index: int) -> str:
    """Name of the shard of one model layer."""
    return f"dymoe-experts-{layer_index:05d}.safetensors"


def checksum(section: memoryview) -> int:
    """XXH3-64 of a section as a signed number: as fast as memory, where zlib's CRC-32 would take longer than a read."""
    return ctypes.c_int64(xxhash.xxh3_64_intdigest(section)).value


@dataclass(frozen=True)
class Manifest:
    """What a store holds and for whom.

    Attributes:
        experts: layers, counts and formats.
        quantizer: how the bytes were made.
        model: fingerprint of the checkpoint they were made from.
        tensor_parallel: (rank, size) of the slice that the store holds.
        errors: of the packed experts; None where they were not recorded. Says nothing of what the store is for.
    """

    experts: ModelExperts
    quantizer: str
    model: str
    tensor_parallel: tuple[int, int] = (0, 1)
    errors: ErrorRecord | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written."""
        fmt = next(iter(self.experts.formats.values()))
        rank, size = self.tensor_parallel
        return {
            "format": "vllm-dymoe experts",
            "version": STORE_VERSION,
            "layers": list(self.experts.layers),
            "num_experts": self.experts.num_experts,
            "top_k": self.experts.top_k,
            "hidden_size": fmt.hidden,
            "intermediate_size": fmt.intermediate,
            "bits": sorted(self.experts.formats, reverse=True),
            "group_size": fmt.group_size,
            "dtype": str(fmt.dtype).removeprefix("torch."),
            "bias": fmt.bias,
            "zeros_in_steps": [bits for bits, f in self.experts.formats.items() if f.zeros_in_steps],
            "ordered": [bits for bits, f in self.experts.formats.items() if f.ordered],
            "quantizer": self.quantizer,
            "model": self.model,
            "tensor_parallel": {"rank": rank, "size": size},
            "blob_bytes": {str(bits): f.nbytes for bits, f in self.experts.formats.items()},
            "errors": self.errors.to_json() if self.errors else None,
        }

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a store.

        Raises:
            StoreError: there is none, or it is not one this version can read.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(path.read_text())
            if data["version"] != STORE_VERSION:
                raise StoreError(
                    f"{path} has store version {data['version']}, but this vllm-dymoe reads version {STORE_VERSION}; "
                    "write the store again with `vllm-dymoe quantize`."
                )
            dtype = getattr(torch, data["dtype"])
            formats = {
                bits: ExpertFormat(
                    data["hidden_size"],
                    data["intermediate_size"],
                    bits,
                    data["group_size"],
                    dtype,
                    data["bias"],
                    bits in data["zeros_in_steps"],
                    bits in data["ordered"],
                )
                for bits in data["bits"]
            }
            experts = ModelExperts(tuple(data["layers"]), data["num_experts"], data["top_k"], formats)
            for bits, fmt in formats.items():
                if data["blob_bytes"][str(bits)] != fmt.nbytes:
                    raise ValueError(f"blobs of {data['blob_bytes'][str(bits)]} bytes where {fmt.nbytes} are expected")
            parallel = data["tensor_parallel"]
            errors = ErrorRecord.from_json(data["errors"]) if data.get("errors") else None
            return cls(experts, data["quantizer"], data["model"], (parallel["rank"], parallel["size"]), errors)
        except OSError as error:
            raise StoreError(f"{folder} holds no expert store: {MANIFEST} cannot be read ({error}).") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(
                f"{path} is not a manifest of an expert store ({error!r}); write the store again."
            ) from error


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where one tensor lies in its file: first byte, and bytes per expert."""

    offset: int
    nbytes: int


class FileStore:
    """Blobs in safetensors shards, read one at a time.

    Reads are ``preadv`` and not loads through a mapping: a truncated or failing
    file is then an error that a request can report, where a mapping would kill
    the process with SIGBUS. The page cache serves both alike.

    Args:
        folder: where manifest and shards are.
        layers: model layers to open, as a pipeline stage needs them; all of the manifest's if None.
        verify: check each section's checksum when it is first read.

    Raises:
        StoreError: a shard is missing, or shorter than its header says.
    """

    def __init__(self, folder: Path, layers: tuple[int, ...] | None = None, *, verify: bool = True) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        held = self.manifest.experts
        if layers is not None and not set(layers) <= set(held.layers):
            raise StoreError(
                f"the experts in {folder} are those of the layers {list(held.layers)}, but {list(layers)} are needed; "
                "write the store again for this model."
            )
        self.experts = held if layers is None else replace(held, layers=layers)
        self._verify = verify
        self._files: list[int] = []
        self._extents: list[Mapping[int, _Extent]] = []
        self._expected: list[Mapping[int, torch.Tensor]] = []
        self._verified: dict[BlobKey, frozenset[int]] = {}
        try:
            for layer_index in self.experts.layers:
                self._open(folder / file_name(layer_index))
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        """The folder."""
        return f"files in {self.folder}"

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        """Read with ``preadv``; see :class:`HostStore`."""
        flags = 0 if wait else os.RWF_NOWAIT
        extent = self._extents[key.layer][key.bits]
        span = self.experts.formats[key.bits].span(projections)
        view = destination.numpy().data
        offset = extent.offset + key.expert * extent.nbytes + span.start
        done, nbytes = 0, span.stop - span.start
        while done < nbytes:
            try:
                count = os.preadv(self._files[key.layer], [view[done:]], offset + done, flags)
            except OSError as error:
                # Not every file system can say whether it would have to wait.
                if not wait and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                    raise BlockingIOError(error.errno, error.strerror) from None
                raise StoreError(
                    f"{self._path(key.layer)} cannot be read at expert {key.expert} ({error.strerror}); check its disk."
                ) from error
            if count == 0:
                raise StoreError(
                    f"{self._path(key.layer)} ends at byte {offset + done}, inside expert {key.expert}; "
                    f"the file was truncated: {_again(self.folder)}."
                )
            done += count
        if self._verify and not self._verified.get(key, _NOTHING).issuperset(projections):
            self._check(key, view, projections)

    def close(self) -> None:
        """Close the shards; reading afterwards fails."""
        while self._files:
            os.close(self._files.pop())

    def _check(self, key: BlobKey, read: memoryview, projections: range) -> None:
        expected = self._expected[key.layer][key.bits][key.expert].tolist()
        sections = self.experts.formats[key.bits].sections
        begin = sections[projections.start].start
        for projection in projections:
            section = sections[projection]
            if checksum(read[section.start - begin : section.stop - begin]) != expected[projection]:
                raise StoreError(
                    f"{self._path(key.layer)} is corrupted: the {Projection(projection).name.lower()} projection of "
                    f"expert {key.expert} at {key.bits} bits does not match its checksum; {_again(self.folder)}."
                )
        self._verified[key] = self._verified.get(key, _NOTHING).union(projections)

    def _path(self, layer: int) -> Path:
        return self.folder / file_name(self.experts.layers[layer])

    def _open(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"{path} of the expert store cannot be opened ({error.strerror}); {_again(path.parent)}."
            ) from error
        self._files.append(file)
        size = os.fstat(file).st_size
        header, start = read_header(path, file)
        extents: dict[int, _Extent] = {}
        expected: dict[int, torch.Tensor] = {}
        promised = start + max((end for _, end in map(_data_offsets, header.values())), default=0)
        if promised > size:
            raise StoreError(
                f"{path} has {size} bytes where its header promises {promised}; "
                f"the file was truncated: {_again(path.parent)}."
            )
        for bits, fmt in self.experts.formats.items():
            begin, _ = self._locate(path, header, f"{bits}bit.blobs", self.experts.num_experts * fmt.nbytes)
            extents[bits] = _Extent(start + begin, fmt.nbytes)
            begin, end = self._locate(path, header, f"{bits}bit.xxh3", self.experts.num_experts * 3 * 8)
            checks = torch.frombuffer(bytearray(os.pread(file, end - begin, start + begin)), dtype=torch.int64)
            expected[bits] = checks.view(self.experts.num_experts, 3)
        self._extents.append(extents)
        self._expected.append(expected)

    @staticmethod
    def _locate(path: Path, header: Mapping[str, Any], name: str, nbytes: int) -> tuple[int, int]:
        if name not in header:
            raise StoreError(f"{path} has no tensor {name}, which the manifest promises; {_again(path.parent)}.")
        begin, end = _data_offsets(header[name])
        if end - begin != nbytes:
            raise StoreError(
                f"{path} holds {end - begin} bytes of {name} where the manifest says {nbytes}; {_again(path.parent)}."
            )
        return begin, end


def _again(folder: Path) -> str:
    """What to do about a store that is not what was written."""
    return f"write the store again with `vllm-dymoe quantize`, or, if vLLM wrote it, remove {folder} and start again"


def _data_offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Where a safetensors header says that a tensor lies; nothing for the entry of metadata."""
    begin, end = entry.get("data_offsets", (0, 0))
    return begin, end


class MemoryStore:
    """Blobs in host memory, one mapping for each layer, page-locked where there is a device to copy to.

    Args:
        experts: what is stored.
        page_lock: locks the memory of a layer once it is filled; None where nobody needs that.

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
        sizes = [experts.num_experts * fmt.nbytes for fmt in experts.formats.values()]
        try:
            for _ in experts.layers:
                self._arenas.append(Arena(sum(sizes), page_lock))
                parts = self._arenas[-1].memory.split(sizes)
                blobs = (part.view(experts.num_experts, -1) for part in parts)
                self._blobs.append(dict(zip(experts.formats, blobs, strict=True)))
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
        """Copy, which never waits; see :class:`HostStore`."""
        destination.copy_(self.blob(key, projections))

    def close(self) -> None:
        """Unlock the memory and let it go."""
        self._blobs.clear()
        while self._arenas:
            self._arenas.pop().close()

    @classmethod
    def from_files(
        cls,
        source: FileStore,
        page_lock: PageLock | None = None,
        progress: Callable[[int], object] = lambda nbytes: None,
    ) -> "MemoryStore":
        """Read a whole file store into memory, layer by layer, and lock it.

        Args:
            source: the files; each section is compared with its checksum.
            page_lock: as for the store.
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


def blob_name(store: HostStore, key: BlobKey) -> str:
    """One blob, for people."""
    return f"expert {key.expert} of layer {store.experts.layers[key.layer]} at {key.bits} bits ({store.description})"


def all_keys(experts: ModelExperts) -> Iterator[BlobKey]:
    """Every blob of a model, layer by layer, in the order it lies on disk."""
    for layer in range(len(experts.layers)):
        yield from layer_keys(experts, layer)


def layer_keys(experts: ModelExperts, layer: int) -> Iterator[BlobKey]:
    """Every blob of one layer (by position), in the order it lies on disk."""
    for bits in experts.formats:
        for expert in range(experts.num_experts):
            yield BlobKey(layer, expert, bits)


def read_header(path: Path, file: int) -> tuple[dict[str, Any], int]:
    """Parse the header of a safetensors file.

    Returns:
        The header, and the offset of the first data byte.

    Raises:
        StoreError: it is not a safetensors file.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        if not 0 < length <= 100_000_000:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(os.pread(file, length, 8)), 8 + length
    except ValueError as error:
        raise StoreError(f"{path} is not a safetensors file ({error}); write the store again.") from error
