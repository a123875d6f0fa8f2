"""A store in files: one safetensors file for each MoE layer.

Each holds a ``uint8 [experts, packed bytes]`` tensor for each version and, beside it, the checksum of every section.
The manifest ``dymoe_experts.json`` describes them and is written last, so a folder with a manifest is complete. Byte
offsets: docs/format.md.
"""

import ctypes
import errno
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from vllm_dymoe.cache.store.base import HostStore, StoreError
from vllm_dymoe.cache.store.disk import (
    MEASURED_STARTS,
    RATES,
    DiskCounts,
    DiskRates,
    Pacer,
    Reading,
    known_rates,
    measure_rates,
    open_direct,
    read_direct,
)
from vllm_dymoe.cache.store.durable import keep_beside
from vllm_dymoe.cache.store.header import TensorPlace, read_header
from vllm_dymoe.cache.store.manifest import Manifest
from vllm_dymoe.cache.store.mapped import MappedFile, lost_pages
from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, Projection, SliceKey, SlicePlace, all_keys
from vllm_dymoe.kernels import native

_NOTHING: frozenset[int] = frozenset()


def file_name(layer_index: int) -> str:
    return f"dymoe-experts-{layer_index:05d}.safetensors"


def checksum(section: memoryview) -> int:
    """XXH3-64 of a section as a signed number: as fast as memory, where zlib's CRC-32 would take longer than a read."""
    return ctypes.c_int64(xxhash.xxh3_64_intdigest(section)).value


class _Layer(NamedTuple):
    path: Path
    file: int
    direct: int | None  # the same past the page cache
    begins: dict[int, tuple[int, int]]  # by bits: first byte, and from one slice to the next
    expected: dict[int, torch.Tensor]  # checksums by bits: int64 [experts, projections]


class FileStore(HostStore):
    """Packed experts in safetensors shards.

    Reads are ``preadv``: a truncated or failing file is an error that a request can report, where a mapping would kill
    the process with SIGBUS.

    Args:
        layers: model layers to open, as a pipeline stage needs them; all of the manifest's if None.

    Attributes:
        reading: how files are read; through the page cache unless another way is chosen.
        counts: of what was read.
    """

    def __init__(self, folder: Path, layers: tuple[int, ...] | None = None) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        held = self.manifest.experts
        if layers is not None and not set(layers) <= set(held.layers):
            raise StoreError(
                f"the experts in {folder} are those of the layers {list(held.layers)}, but {list(layers)} are needed; "
                "write the store again for this model."
            )
        self.experts = held if layers is None else replace(held, layers=layers)
        self.reading, self.counts, self._pacer = Reading(), DiskCounts(), Pacer()
        self._layers: list[_Layer] = []
        self._descriptors: list[int] = []
        self._verified: dict[SliceKey, frozenset[int]] = {}
        self._mapped, self._lost = cache(lambda layer: MappedFile(self._layers[layer].file)), lost_pages()
        try:
            for layer_index in self.experts.layers:
                self._open(folder / file_name(layer_index), held.places_at(self.manifest.alignment))
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        folders = dict.fromkeys(str(layer.path.parent) for layer in self._layers)
        return f"files in {' and '.join(folders)}{self.reading.description}"

    @property
    def depth(self) -> int:
        return self.reading.depth

    @property
    def occupies_cores(self) -> bool:
        return not self.reading.direct

    def rates(self) -> DiskRates:
        """How fast its disk is: the best of what the first starts have measured, a second each, and kept beside it;
        StoreError if the files cannot be read."""
        found = known_rates(self.folder)
        if found is None or found.measured < MEASURED_STARTS:
            bits, fmt = max(self.experts.formats.items(), key=lambda item: item[1].nbytes)
            keys = [key for key in all_keys(self.experts) if key.bits == bits]
            whole, direct = fmt.span(EVERY_PROJECTION), all(layer.direct is not None for layer in self._layers)

            def read(number: int, reading: Reading) -> int:
                self._fill(keys[number], torch.empty(fmt.nbytes, dtype=torch.uint8), whole, reading)
                return fmt.nbytes

            def forget(number: int) -> None:
                key = keys[number]
                os.posix_fadvise(self._layers[key.layer].file, self._begin(key), fmt.nbytes, os.POSIX_FADV_DONTNEED)

            now = measure_rates(read, forget, range(len(keys)), fmt.nbytes, direct)
            found = now if found is None else found.best(now)
            keep_beside(self.folder / RATES, found)
        return found

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        span, reading = self.experts.formats[key.bits].span(projections), self.reading
        with self.counts.reading(span.stop - span.start):
            self._fill(key, destination, span, reading, wait=wait)
        if reading.check == "always" or not self._verified.get(key, _NOTHING).issuperset(projections):
            self._check(key, destination.numpy().data, projections)

    @property
    def mapped(self) -> bool:
        way = self.reading
        plain = not (way.direct or way.drops or way.bytes_per_second) and way.check == "first"
        return plain and native.load() is not None and lost_pages() == self._lost

    def in_memory(self, key: SliceKey) -> bool:
        try:
            nbytes = self.experts.formats[key.bits].nbytes
            if not self.mapped or not self._mapped(key.layer).has(self._begin(key), nbytes):
                return False
            if not self._verified.get(key, _NOTHING).issuperset(EVERY_PROJECTION):
                self._check(key, self.packed(key).numpy().data, EVERY_PROJECTION)
        except (OSError, ValueError, StoreError):  # what is wrong with a file a read says, to those that it concerns
            return False
        return True

    def lost(self, keys: Iterable[SliceKey]) -> str:
        if lost_pages() == self._lost:
            return ""
        try:
            for key in keys:
                self.read_into(key, torch.empty(self.experts.formats[key.bits].nbytes, dtype=torch.uint8))
        except StoreError as error:
            return str(error)
        return f"{self.description} could not be read in the middle of a step; check the disk."

    def packed(self, key: SliceKey) -> torch.Tensor:
        begin = self._begin(key)
        return self._mapped(key.layer).bytes[begin : begin + self.experts.formats[key.bits].nbytes]

    def take(self, other: HostStore, experts: ModelExperts) -> None:
        assert isinstance(other, FileStore)
        self.experts = experts
        self._layers += other._layers
        self._descriptors += other._descriptors
        other._descriptors = []

    def _begin(self, key: SliceKey) -> int:
        """First byte of a slice."""
        begin, stride = self._layers[key.layer].begins[key.bits]
        return begin + key.expert * stride

    def _fill(
        self, key: SliceKey, destination: torch.Tensor, span: slice, reading: Reading, *, wait: bool = True
    ) -> None:
        begun, path, file, direct = time.perf_counter(), *self._layers[key.layer][:3]
        offset, nbytes = self._begin(key) + span.start, span.stop - span.start
        past = reading.direct and direct is not None
        if not wait and (past or reading.bytes_per_second):
            raise BlockingIOError(errno.EAGAIN, "a disk has to be waited for")
        try:
            if past and direct is not None:
                done = read_direct(direct, destination, offset)
            else:
                done = _read_cached(file, destination, offset, wait=wait)
        except OSError as error:
            # Not every file system can say whether it would have to wait.
            if not wait and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise BlockingIOError(error.errno, error.strerror) from None
            raise StoreError(
                f"{path} cannot be read at expert {key.expert} ({error.strerror}); check its disk."
            ) from error
        if done < nbytes:
            raise StoreError(
                f"{path} ends at byte {offset + done}, inside expert {key.expert}; "
                f"the file was truncated: {_again(self.folder)}."
            )
        if reading.drops and not past:
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)
        if reading.bytes_per_second:
            self._pacer.wait(nbytes, begun, reading.bytes_per_second)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _check(self, key: SliceKey, read: memoryview, projections: range) -> None:
        layer = self._layers[key.layer]
        expected = layer.expected[key.bits][key.expert].tolist()
        sections = self.experts.formats[key.bits].sections
        begin = sections[projections.start].start
        for projection in projections:
            section = sections[projection]
            there = read[section.start - begin : section.stop - begin]
            if there and checksum(there) != expected[projection]:
                raise StoreError(
                    f"{layer.path} is corrupted: the {Projection(projection).name.lower()} projection of "
                    f"expert {key.expert} at {key.bits} bits does not match its checksum; {_again(self.folder)}."
                )
        self._verified[key] = self._verified.get(key, _NOTHING).union(projections)

    def _open(self, path: Path, slices: Mapping[int, SlicePlace]) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"{path} of the expert store cannot be opened ({error.strerror}); {_again(path.parent)}."
            ) from error
        self._descriptors.append(file)
        if (direct := open_direct(path)) is not None:
            self._descriptors.append(direct)
        size = os.fstat(file).st_size
        places = read_header(path, file)
        reserved = max((place.end for place in places.values()), default=0)
        if reserved > size:
            raise StoreError(
                f"{path} has {size} bytes where its header promises {reserved}; "
                f"the file was truncated: {_again(path.parent)}."
            )
        count, begins, expected = self.experts.num_experts, {}, {}
        for bits, (packed, stride, start, number, parts) in slices.items():
            begins[bits] = _locate(path, places, f"{packed}bit.packed experts", count * stride).begin + start, stride
            place = _locate(path, places, f"{packed}bit.xxh3", count * parts * len(Projection) * 8)
            checks = bytearray(os.pread(file, place.nbytes, place.begin))
            expected[bits] = torch.frombuffer(checks, dtype=torch.int64).view(count, parts, len(Projection))[:, number]
        self._layers.append(_Layer(path, file, direct, begins, expected))


def _read_cached(file: int, destination: torch.Tensor, offset: int, *, wait: bool) -> int:
    """Through the page cache; returns how many bytes the file had. Without ``wait`` BlockingIOError if a disk has to be
    waited for."""
    view, done = destination.numpy().data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done, 0 if wait else os.RWF_NOWAIT)
        if count == 0:
            break
        done += count
    return done


def _locate(path: Path, places: Mapping[str, TensorPlace], name: str, nbytes: int) -> TensorPlace:
    place = places.get(name)
    if place is None:
        raise StoreError(f"{path} has no tensor {name}, which the manifest promises; {_again(path.parent)}.")
    if place.nbytes != nbytes:
        raise StoreError(
            f"{path} holds {place.nbytes} bytes of {name} where the manifest says {nbytes}; {_again(path.parent)}."
        )
    return place


def _again(folder: Path) -> str:
    return f"write the store again with `vllm-dymoe quantize`, or, if vLLM wrote it, remove {folder} and start again"
