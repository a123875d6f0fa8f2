"""A store in files: one safetensors file for each MoE layer.

Each holds a ``uint8 [experts, blob bytes]`` tensor for each version and, beside it, the checksum of every section.
The manifest ``dymoe_experts.json`` describes them and is written last, so a folder with a manifest is complete. Byte
offsets: docs/format.md.
"""

import ctypes
import errno
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from vllm_dymoe.residency.format import EVERY_PROJECTION, BlobKey, Projection
from vllm_dymoe.store.base import StoreError
from vllm_dymoe.store.disk import (
    DiskCounts,
    DiskRates,
    Pacer,
    Reading,
    keep_rates,
    known_rates,
    measure_rates,
    open_direct,
    read_direct,
)
from vllm_dymoe.store.header import TensorPlace, read_header
from vllm_dymoe.store.manifest import Manifest

_NOTHING: frozenset[int] = frozenset()


def file_name(layer_index: int) -> str:
    return f"dymoe-experts-{layer_index:05d}.safetensors"


def checksum(section: memoryview) -> int:
    """XXH3-64 of a section as a signed number: as fast as memory, where zlib's CRC-32 would take longer than a read."""
    return ctypes.c_int64(xxhash.xxh3_64_intdigest(section)).value


class FileStore:
    """Blobs in safetensors shards.

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
        self._places = held.places_at(self.manifest.alignment)
        self._files: list[int] = []
        self._direct: list[int | None] = []  # the same past the page cache
        self._blobs: list[dict[int, int]] = []  # of each layer: first byte, by bits
        self._expected: list[dict[int, torch.Tensor]] = []
        self._verified: dict[BlobKey, frozenset[int]] = {}
        try:
            for layer_index in self.experts.layers:
                self._open(folder / file_name(layer_index))
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        return f"files in {self.folder}{self.reading.description}"

    @property
    def depth(self) -> int:
        return self.reading.depth

    @property
    def occupies_cores(self) -> bool:
        return not self.reading.direct

    def rates(self) -> DiskRates:
        """How fast its disk is: what an earlier start has kept beside it, or a measurement of a second.

        Raises:
            StoreError: the files cannot be read.
        """
        found = known_rates(self.folder)
        if found is None:
            bits, fmt = max(self.experts.formats.items(), key=lambda item: item[1].nbytes)
            keys = [BlobKey(layer, expert, bits) for layer in range(len(self._files))
                    for expert in range(self.experts.num_experts)]  # fmt: skip

            def read(number: int, reading: Reading) -> int:
                self._fill(
                    keys[number], torch.empty(fmt.nbytes, dtype=torch.uint8), fmt.span(EVERY_PROJECTION), reading
                )
                return fmt.nbytes

            def forget(number: int) -> None:
                key = keys[number]
                os.posix_fadvise(self._files[key.layer], self._begin(key), fmt.nbytes, os.POSIX_FADV_DONTNEED)

            found = measure_rates(read, forget, range(len(keys)), fmt.nbytes, None not in self._direct)
            keep_rates(self.folder, found)
        return found

    def read_into(
        self, key: BlobKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        span, reading = self.experts.formats[key.bits].span(projections), self.reading
        with self.counts.reading(span.stop - span.start):
            self._fill(key, destination, span, reading, wait=wait)
        if reading.check == "always" or not self._verified.get(key, _NOTHING).issuperset(projections):
            self._check(key, destination.numpy().data, projections)

    def _begin(self, key: BlobKey) -> int:
        """First byte of a slice."""
        return self._blobs[key.layer][key.bits] + key.expert * self._places[key.bits].stride

    def _fill(
        self, key: BlobKey, destination: torch.Tensor, span: slice, reading: Reading, *, wait: bool = True
    ) -> None:
        begun, file, direct = time.perf_counter(), self._files[key.layer], self._direct[key.layer]
        offset, nbytes = self._begin(key) + span.start, span.stop - span.start
        past = reading.direct and direct is not None
        if not wait and (past or reading.bytes_per_second):
            raise BlockingIOError(errno.EAGAIN, "a disk has to be waited for")
        try:
            if past and direct is not None:
                done = read_direct(direct, destination, offset)
            else:
                done = _read_cached(file, destination.numpy().data, offset, 0 if wait else os.RWF_NOWAIT)
        except OSError as error:
            # Not every file system can say whether it would have to wait.
            if not wait and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise BlockingIOError(error.errno, error.strerror) from None
            raise StoreError(
                f"{self._path(key.layer)} cannot be read at expert {key.expert} ({error.strerror}); check its disk."
            ) from error
        if done < nbytes:
            raise StoreError(
                f"{self._path(key.layer)} ends at byte {offset + done}, inside expert {key.expert}; "
                f"the file was truncated: {_again(self.folder)}."
            )
        if reading.drops and not past:
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)
        if reading.bytes_per_second:
            self._pacer.wait(nbytes, begun, reading.bytes_per_second)

    def close(self) -> None:
        for file in self._files + [file for file in self._direct if file is not None]:
            os.close(file)
        self._files, self._direct = [], []

    def _check(self, key: BlobKey, read: memoryview, projections: range) -> None:
        expected = self._expected[key.layer][key.bits][key.expert].tolist()
        sections = self.experts.formats[key.bits].sections
        begin = sections[projections.start].start
        for projection in projections:
            section = sections[projection]
            there = read[section.start - begin : section.stop - begin]
            if there and checksum(there) != expected[projection]:
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
        self._direct.append(open_direct(path))
        size = os.fstat(file).st_size
        places = read_header(path, file)
        promised = max((place.end for place in places.values()), default=0)
        if promised > size:
            raise StoreError(
                f"{path} has {size} bytes where its header promises {promised}; "
                f"the file was truncated: {_again(path.parent)}."
            )
        count, begins, expected = self.experts.num_experts, {}, {}
        for bits, (blob, stride, start, number, slices) in self._places.items():
            begins[bits] = _locate(path, places, f"{blob}bit.blobs", count * stride).begin + start
            place = _locate(path, places, f"{blob}bit.xxh3", count * slices * len(Projection) * 8)
            checks = bytearray(os.pread(file, place.nbytes, place.begin))
            expected[bits] = torch.frombuffer(checks, dtype=torch.int64).view(count, slices, len(Projection))[:, number]
        self._blobs.append(begins)
        self._expected.append(expected)


def _read_cached(file: int, view: memoryview, offset: int, flags: int) -> int:
    """``preadv`` through the page cache; returns how many bytes the file had."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done, flags)
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
