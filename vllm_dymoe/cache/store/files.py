"""A store in files: one safetensors file for each MoE layer.

Each file holds a ``uint8 [experts, packed bytes]`` tensor for each version and the checksum of every section. The
manifest ``dymoe_experts.json`` describes them and is written last, so a folder with a manifest is complete. Byte
offsets: docs/format.md.
"""

import contextlib
import ctypes
import errno
import json
import os
import random
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from vllm_dymoe.cache.store.base import DamagedStoreError, HostStore, StoreError
from vllm_dymoe.cache.store.disk import (
    MEASURED_STARTS,
    DiskCounts,
    DiskRates,
    Pacer,
    Reading,
    keep_rates,
    known_rates,
    measure_rates,
    read_direct,
    set_direct,
)
from vllm_dymoe.cache.store.header import TensorPlace, read_header, read_metadata
from vllm_dymoe.cache.store.manifest import MANIFEST, STORE_VERSION, Manifest
from vllm_dymoe.cache.store.mapped import MappedFile, in_page_cache, lost_pages
from vllm_dymoe.durable import close_file, open_regular, replace_file
from vllm_dymoe.experts.format import (
    EVERY_PROJECTION,
    ModelExperts,
    Projection,
    SliceKey,
    SlicePlace,
    all_keys,
    places_at,
)
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import native

_NOTHING: frozenset[int] = frozenset()
_SPARE_DESCRIPTORS = 16  # for files that the process opens for a moment
_READS_OF_ALL = 8  # concurrent reads past the page cache while everything is read
_SAMPLE = 64  # slices whose pages are looked up in the page cache, to choose how everything is read


def file_name(layer_index: int) -> str:
    return f"dymoe-experts-{layer_index:05d}.safetensors"


def checksum(section: memoryview) -> int:
    """Return XXH3-64 of a section as a signed number.

    It is as fast as memory; zlib's CRC-32 is slower than a read.
    """
    return ctypes.c_int64(xxhash.xxh3_64_intdigest(section)).value


class _Layer(NamedTuple):
    path: Path
    file: int
    begins: dict[int, tuple[int, int]]  # by bits: first byte, and distance of slices
    expected: dict[int, torch.Tensor]  # checksums by bits: int64 [experts, projections]


class Piece(NamedTuple):
    """Adjacent bytes of a file."""

    path: Path
    file: int
    offset: int
    nbytes: int


class Stamp(NamedTuple):
    """A file's metadata, which every write changes."""

    size: int
    modified: int  # ns
    changed: int  # ns; a process cannot set it

    @classmethod
    def of(cls, file: int) -> "Stamp":
        status = os.fstat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class FileStore(HostStore):
    """Packed experts in safetensors shards.

    Reads use ``preadv``: a truncated or failing file is an error that a request can report, whereas with a mapping
    SIGBUS would kill the process. Bytes from a disk are compared with their checksums every time; bytes from the page
    cache only once, and again after their file was written to.

    DamagedStoreError if files do not match the manifest, StoreError if they cannot be read.

    Args:
        layers: model layers to open, for a pipeline stage; all of the manifest's if None.

    Attributes:
        counts: of reads.
        unmapped: why a CPU cannot compute from mapped files; empty if it can, or if that was not tried.
    """

    def __init__(self, folder: Path, layers: tuple[int, ...] | None = None) -> None:
        manifest = Manifest.read(folder)
        held = manifest.experts
        if layers is not None and not set(layers) <= set(held.layers):
            raise StoreError(
                f"the experts in {folder} are for the layers {list(held.layers)}, but {list(layers)} are needed; "
                "write the store again for this model."
            )
        self._prepare(folder, manifest, held if layers is None else replace(held, layers=layers))
        check_descriptors(folder, len(self.experts.layers))
        try:
            for layer_index in self.experts.layers:
                position = held.layers.index(layer_index)
                self._open(layer_index, places_at(held.of_layers[position], self.manifest.alignment))
        except BaseException:
            self.close()
            raise

    def _prepare(self, folder: Path, manifest: Manifest, experts: ModelExperts) -> None:
        """Set what stores of all kinds have before a file is open."""
        self.folder, self.manifest, self.experts = folder, manifest, experts
        self.counts, self._pacer = DiskCounts(), Pacer()
        self._reading, self._direct, self._turns = Reading(), False, threading.Semaphore()
        self._layers: list[_Layer] = []
        self._descriptors: list[int] = []
        self._verified: dict[SliceKey, frozenset[int]] = {}
        self._stamps: list[Stamp] = []
        self._writes: list[int] = []  # how often each layer's file was found to have been written to
        self._maps: list[MappedFile] = []
        self.unmapped, self.lost_before = "", lost_pages()

    @property
    def description(self) -> str:
        folders = dict.fromkeys(str(layer.path.parent) for layer in self._layers)
        unmapped = f", not mapped: {self.unmapped}" if self.unmapped else ""
        return f"files in {' and '.join(folders)}{self.reading.description}{unmapped}"

    @property
    def reading(self) -> Reading:
        """How files are read; through the page cache unless set otherwise."""
        return self._reading

    @reading.setter
    def reading(self, way: Reading) -> None:
        self._reading, self._turns = way, threading.Semaphore(way.depth)
        self._direct = all([set_direct(file, direct=way.direct) for file in self._descriptors])
        if not self._direct:
            for file in self._descriptors:
                set_direct(file, direct=False)

    @contextlib.contextmanager
    def reading_all(self) -> Iterator[None]:
        """Read past the page cache, unless it holds most of the files.

        For a start that reads every byte once: the page cache would copy the bytes, and take the memory that they are
        to fill. An emulated disk is read as before.
        """
        before = self.reading
        if not (before.drops or before.bytes_per_second or self._mostly_cached()):
            self.reading = replace(before, direct=True, depth=_READS_OF_ALL)
        try:
            yield
        finally:
            self.reading = before

    def _mostly_cached(self) -> bool:
        keys = list(all_keys(self.experts))
        sample = random.Random(0).sample(keys, min(len(keys), _SAMPLE))
        pieces = (self._pieces(key, EVERY_PROJECTION)[0] for key in sample)
        held = sum(in_page_cache(piece.file, piece.offset, piece.nbytes) for piece in pieces)
        return 2 * held > len(sample)

    @property
    def depth(self) -> int:
        """Number of threads that read; past the page cache two more than reads.

        Reads at the same time are as many as the disk does best. Each thread also verifies its bytes, and
        two more keep the disk busy meanwhile (benchmarks/LOG.md).
        """
        return self.reading.depth + 2 * self._direct

    @property
    def occupies_cores(self) -> bool:
        return not self.reading.direct

    def rates(self) -> DiskRates:
        """Return the disk's rates, measured if needed.

        The first starts on this machine measure for a second each; the best rates are stored next to the files.
        StoreError if the files cannot be read.
        """
        found = known_rates(self.folder)
        if found is None or found.measured < MEASURED_STARTS:
            every = list(all_keys(self.experts))
            fmt = max(map(self.experts.format, every), key=lambda fmt: fmt.nbytes)
            keys = [key for key in every if self.experts.format(key) == fmt]
            before = self.reading

            def use(reading: Reading) -> bool:
                self.reading = reading
                return self._direct

            def read(number: int) -> int:
                self._fill(keys[number], torch.empty(fmt.nbytes, dtype=torch.uint8), EVERY_PROJECTION)
                return fmt.nbytes

            def forget(number: int) -> None:
                for piece in self._pieces(keys[number], EVERY_PROJECTION):
                    _forget(piece.file, piece.offset, piece.nbytes)

            try:
                now = measure_rates(use, read, forget, range(len(keys)), fmt.nbytes)
            finally:
                self.reading = before
            found = now if found is None else found.best(now)
            keep_rates(self.folder, found)
        return found

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        span = self.experts.format(key).span(projections)
        self._look(key.layer)
        with self.counts.reading(span.stop - span.start):
            from_disk = self._fill(key, destination, projections, wait=wait)
        checks = from_disk or self.reading.check == "always"
        if checks or not self._verified.get(key, _NOTHING).issuperset(projections):
            self.check(key, destination, projections)

    @property
    def mapped(self) -> bool:
        way = self._reading
        plain = not (way.direct or way.drops or way.bytes_per_second) and way.check == "first"
        return plain and native.load() is not None and lost_pages() == self.lost_before and self._map()

    def in_memory(self, key: SliceKey) -> bool:
        try:
            nbytes = self.experts.format(key).nbytes
            if not self.mapped:
                return False
            if not self._maps[key.layer].has(self._begin(key), nbytes):
                self._verified.pop(key, None)  # it is read from disk again
                return False
            if not self._verified.get(key, _NOTHING).issuperset(EVERY_PROJECTION):
                self.check(key, self.packed(key))
        except (OSError, ValueError, StoreError):  # a read reports a file's fault to the requests that need it
            return False
        return True

    def writes(self) -> list[int]:
        for layer in range(len(self._layers)):
            with contextlib.suppress(StoreError):  # a read reports it to the requests that need the file
                self._look(layer)
        return list(self._writes)

    def lost(self, keys: Iterable[SliceKey]) -> str:
        if lost_pages() == self.lost_before:
            return ""
        try:
            for key in keys:
                self.read_into(key, torch.empty(self.experts.format(key).nbytes, dtype=torch.uint8))
        except StoreError as error:
            return str(error)
        return f"{self.description} could not be read in the middle of a step; check the disk."

    def packed(self, key: SliceKey) -> torch.Tensor:
        begin = self._begin(key)
        return self._maps[key.layer].bytes[begin : begin + self.experts.format(key).nbytes]

    def take(self, other: HostStore, experts: ModelExperts) -> None:
        assert isinstance(other, FileStore)
        self.experts = experts
        self._layers += other._layers
        self._descriptors += other._descriptors
        self._stamps += other._stamps
        self._writes += other._writes
        other._descriptors = []
        self.reading = self.reading  # also for the files that were added

    def bind(self) -> None:
        """Write digests of the shards into an older store's manifest.

        New stores have them. The caller must have read and verified everything before. StoreError if the manifest
        cannot be written.
        """
        described = replace(self.manifest, version=STORE_VERSION, described="")
        shards = {}
        try:
            for layer_index, layer in zip(self.experts.layers, self._layers, strict=True):
                places = read_header(layer.path, layer.file)
                shards[layer_index] = digest_of(described, layer_index, layer.file, places)
            write_manifest(self.folder / MANIFEST, replace(described, shards=shards))
        except OSError as error:
            raise StoreError(f"{self.folder / MANIFEST} cannot be written ({error.strerror}).") from error

    def _begin(self, key: SliceKey) -> int:
        """Return the offset of a slice."""
        begin, stride = self._layers[key.layer].begins[key.bits]
        return begin + key.expert * stride

    def _map(self) -> bool:
        """Map all files, so that a CPU can compute from them.

        Returns whether they are mapped.
        """
        if len(self._maps) < len(self._layers) and not self.unmapped:
            try:
                for layer in self._layers[len(self._maps) :]:
                    self._maps.append(MappedFile(layer.file))
            except OSError as error:
                self.unmapped = error.strerror or str(error)
        return not self.unmapped

    def _look(self, layer: int) -> None:
        """Check whether a file was written to since it was opened.

        If it was, its slices are verified again.
        """
        try:
            now = Stamp.of(self._layers[layer].file)
        except OSError as error:
            raise cannot_read(self._layers[layer].path, error) from error
        if now != self._stamps[layer]:
            for key in [key for key in list(self._verified) if key.layer == layer]:
                self._verified.pop(key, None)
            self._stamps[layer] = now
            self._writes[layer] += 1

    def _pieces(self, key: SliceKey, projections: range) -> list[Piece]:
        """Return where adjacent projections of a slice are, in order."""
        layer, span = self._layers[key.layer], self.experts.format(key).span(projections)
        return [Piece(layer.path, layer.file, self._begin(key) + span.start, span.stop - span.start)]

    def _fill(self, key: SliceKey, destination: torch.Tensor, projections: range, *, wait: bool = True) -> bool:
        """Read a part of a slice; return whether the system says that a disk was read."""
        if not wait and (self._direct or self._reading.bytes_per_second):
            raise BlockingIOError(errno.EAGAIN, "the read would have to wait for a disk")
        begin, from_disk = 0, False
        for piece in self._pieces(key, projections):
            from_disk |= self._read(piece, destination[begin : begin + piece.nbytes], key.expert, wait=wait)
            begin += piece.nbytes
        return from_disk

    def _read(self, piece: Piece, destination: torch.Tensor, expert: int, *, wait: bool) -> bool:
        begun, reading, direct = time.perf_counter(), self._reading, self._direct
        path, file, offset, nbytes = piece
        try:
            if direct:
                with self._turns:
                    done, from_disk = read_direct(file, destination, offset), True
            else:
                done, from_disk = _read_cached(file, destination, offset, wait=wait)
        except BlockingIOError:
            raise
        except OSError as error:
            raise cannot_read(path, error, f" at expert {expert}") from error
        if done < nbytes:
            raise DamagedStoreError(
                f"{path} ends at byte {offset + done}, inside expert {expert}; the file was truncated: {self._again}."
            )
        if reading.drops and not direct:
            _forget(file, offset, nbytes)
        if reading.bytes_per_second:
            self._pacer.wait(nbytes, begun, reading.bytes_per_second)
        return from_disk or reading.bytes_per_second is not None

    @property
    def _again(self) -> str:
        """What the user can do about a damaged file."""
        return _again(self.folder)

    def close(self) -> None:
        self._maps.clear()
        while self._descriptors:
            close_file(self._descriptors.pop())

    def check(self, key: SliceKey, read: torch.Tensor, projections: range = EVERY_PROJECTION) -> None:
        """Compare bytes of a slice with their checksums.

        ``read`` is uint8, contiguous. Indices that kernels use are checked as well. DamagedStoreError if something is
        wrong.
        """
        layer, there = self._layers[key.layer], read.numpy().data
        expected = layer.expected[key.bits][key.expert].tolist()
        fmt = self.experts.format(key)
        begin = fmt.sections[projections.start].start
        for projection in projections:
            section = fmt.sections[projection]
            part = there[section.start - begin : section.stop - begin]
            wrong = ""
            if part and checksum(part) != expected[projection]:
                wrong = "does not match its checksum"
            elif part and not _orders_columns(fmt.matrices[projection], part):
                wrong = "has an invalid order of columns"
            if wrong:
                raise DamagedStoreError(
                    f"{layer.path} is corrupted: the {Projection(projection).name.lower()} projection of "
                    f"expert {key.expert} at {key.bits} bits {wrong}; {_again(self.folder)}."
                )
        self._verified[key] = self._verified.get(key, _NOTHING).union(projections)

    def _open(self, layer_index: int, slices: Mapping[int, SlicePlace]) -> None:
        path = self.folder / file_name(layer_index)
        try:
            file = open_regular(path)
            self._descriptors.append(file)
            self._stamps.append(Stamp.of(file))
            self._writes.append(0)
            self._layers.append(self._read_tables(layer_index, path, file, slices))
        except FileNotFoundError as error:
            raise DamagedStoreError(f"{path} of the expert store is missing; {_again(self.folder)}.") from error
        except OSError as error:
            raise cannot_read(path, error) from error

    def _read_tables(self, layer_index: int, path: Path, file: int, slices: Mapping[int, SlicePlace]) -> _Layer:
        places = read_header(path, file)
        count, begins, expected = self.experts.num_experts, {}, {}
        for bits, (packed, stride, start, number, parts) in slices.items():
            begins[bits] = _locate(path, places, f"{packed}bit.blobs", count * stride).begin + start, stride
            place = _locate(path, places, f"{packed}bit.xxh3", count * parts * len(Projection) * 8)
            checks = bytearray(os.pread(file, place.nbytes, place.begin))
            if len(checks) < place.nbytes:
                raise DamagedStoreError(f"{path} was truncated; {_again(path.parent)}.")
            expected[bits] = torch.frombuffer(checks, dtype=torch.int64).view(count, parts, len(Projection))[:, number]
        digest = digest_of(self.manifest, layer_index, file, places)
        if self.manifest.binds and digest != self.manifest.shards.get(layer_index):
            said = read_metadata(file)
            whose = f"layer {said.get('layer', '?')} of model {said.get('model', '?')}"
            raise DamagedStoreError(
                f"{path} is not the file that {MANIFEST} next to it expects for layer {layer_index} of model "
                f"{self.manifest.model}: it claims to be {whose}; {_again(path.parent)}."
            )
        return _Layer(path, file, begins, expected)


def digest_of(manifest: Manifest, layer_index: int, file: int, places: Mapping[str, TensorPlace]) -> str:
    """Return an open shard's digest for the manifest; OSError if it cannot be read."""
    header = os.pread(file, min((place.begin for place in places.values()), default=0), 0)
    tables = [os.pread(file, place.nbytes, place.begin) for place in places.values() if place.name.endswith(".xxh3")]
    return manifest.shard_digest(layer_index, header, tables)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest durably; OSError if that fails."""
    replace_file(path, (json.dumps(manifest.to_json(), indent=2) + "\n").encode())


def check_descriptors(folder: Path, needed: int) -> None:
    """Raise StoreError if opening ``needed`` files would exceed this process's limit."""
    with contextlib.suppress(OSError):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        there = len(os.listdir("/proc/self/fd"))
        wanted = there + needed + _SPARE_DESCRIPTORS
        if wanted > limit != resource.RLIM_INFINITY:
            raise StoreError(
                f"the experts in {folder} are {needed} files, but this process has {there} of {limit} files open "
                f"(ulimit -n); raise the limit to {wanted} or more."
            )


def _forget(file: int, offset: int, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # the call is only advice
        os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _orders_columns(form: MatrixFormat, section: memoryview) -> bool:
    """Return whether a section's order of columns is a permutation, if it has one.

    Kernels use the order unchecked.
    """
    if not form.act_order or not form.rows or form.nested:
        return True
    order = np.frombuffer(section, np.uint16, form.columns, form.order_offset)
    return bool(order.max() < form.columns) and len(np.unique(order)) == form.columns


def _read_cached(file: int, destination: torch.Tensor, offset: int, *, wait: bool) -> tuple[int, bool]:
    """Read through the page cache.

    Returns the number of bytes read, and whether some may have come from a disk. BlockingIOError without ``wait`` if
    the read would have to wait for a disk.
    """
    view, done, flags, from_disk = destination.numpy().data, 0, os.RWF_NOWAIT, False
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done, flags)
        except OSError as error:
            # Not every file system can tell whether it would have to wait.
            if flags == 0 or error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if not wait:
                raise BlockingIOError(error.errno, error.strerror) from None
            flags, from_disk = 0, True
            continue
        if count == 0:
            break
        done += count
    return done, from_disk


def _locate(path: Path, places: Mapping[str, TensorPlace], name: str, nbytes: int) -> TensorPlace:
    place = places.get(name)
    if place is None:
        raise DamagedStoreError(f"{path} has no tensor {name}, which the manifest lists; {_again(path.parent)}.")
    if place.nbytes != nbytes:
        raise DamagedStoreError(
            f"{path} holds {place.nbytes} bytes of {name} where the manifest says {nbytes}; {_again(path.parent)}."
        )
    return place


def cannot_read(path: Path, error: OSError, where: str = "") -> StoreError:
    """Return a StoreError for a fault of this process or moment.

    Such a fault is no reason to write the store again.
    """
    advice = "check its disk; the store is left as it is"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "raise the limit of open files (ulimit -n)"
    elif error.errno in (errno.EACCES, errno.EPERM):
        advice = "allow this user to read it"
    return StoreError(f"{path} cannot be read{where} ({error.strerror or error}); {advice}.")


def _again(folder: Path) -> str:
    return f"write the store again with `vllm-dymoe quantize`, or, if vLLM wrote it, remove {folder} and start again"
