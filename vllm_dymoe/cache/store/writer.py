"""The one writer of stores: a store is complete or does not exist.

Sections are written at their final offsets into shards in a temporary folder next to the final one, each with its
checksum. Finishing syncs, writes the manifest and renames. After a crash, or if the disk refused, the next writer
removes the temporary folder or continues it. If two processes write the same store, the second finds the first one's
and uses it.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vllm_dymoe.cache.store.base import DamagedStoreError, StoreError
from vllm_dymoe.cache.store.files import FileStore, checksum, digest_of, file_name, write_manifest
from vllm_dymoe.cache.store.header import make_header, read_header
from vllm_dymoe.cache.store.manifest import MANIFEST, ErrorRecord, Manifest
from vllm_dymoe.durable import (
    close_file,
    create,
    disk_bytes,
    leftovers,
    make_folders,
    make_partial,
    publish,
    replace_folder,
    sync_folder,
    write_at,
)
from vllm_dymoe.experts.format import Projection, SliceKey, SlicePlace, places_at
from vllm_dymoe.units import size, too_small

# Data begins on a page.
_DATA_ALIGNMENT = 4096

JOURNAL = "packed.jsonl"  # lists complete layers, as long as a store is not complete


def _tensors(count: int, places: Mapping[int, SlicePlace]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return the tensors of a layer's file: name, dtype, shape, bytes.

    Packed experts come first, so that each of them is aligned.
    """
    slices = [place for place in places.values() if place.start == 0]
    return [
        *((f"{one.bits}bit.blobs", "U8", (count, one.stride), count * one.stride) for one in slices),
        *((f"{one.bits}bit.xxh3", "I64", (count, one.slices, 3), count * one.slices * 3 * 8) for one in slices),
    ]


class StoreWriter:
    """Writes one store, from several threads.

    End with ``finish``, ``leave`` or ``discard``. StoreError if the folder cannot be written, or if the disk is too
    small for what is not written yet.

    Args:
        others: bytes of other files for the folder.
        resume: returns whether to continue a temporary folder of a dead writer.
        advice: what the user can do if the disk refuses.

    Attributes:
        partial: the temporary folder; other files in it become part of the final one.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        others: int = 0,
        resume: Callable[[Path], bool] = lambda leftover: False,
        advice: str = "free some space or set store_dir to a folder on another disk",
    ) -> None:
        self._folder, self._manifest, self._advice = folder, manifest, advice
        self._files: list[int] = []
        self._continuable = False  # whether another writer could continue the temporary folder
        experts = manifest.experts
        self._places = [places_at(formats, manifest.alignment) for formats in experts.of_layers]
        made = [
            make_header(
                _tensors(experts.num_experts, places),
                {"format": "vllm-dymoe experts", "layer": f"{layer:05d}", "model": manifest.model},
                _DATA_ALIGNMENT,
            )
            for layer, places in zip(experts.layers, self._places, strict=True)
        ]
        self._begins = [begins for _, begins, _ in made]
        needed = sum(nbytes for _, _, nbytes in made) + others
        try:
            make_folders(folder.parent)
            left = leftovers(folder)
            self.partial, self._lock = make_partial(folder, resume)
            self._continuable = self.partial in left
        except OSError as error:
            raise self._refused(error) from error
        try:
            with self.refusals():
                self._check_space(needed)
                for layer_index, (header, _, nbytes) in zip(experts.layers, made, strict=True):
                    self._files.append(create(self.partial / file_name(layer_index), exclusive=False))
                    write_at(self._files[-1], header, 0)
                    os.ftruncate(self._files[-1], nbytes)
        except BaseException:
            self.leave()
            raise

    def write(self, key: SliceKey, projection: Projection, packed: torch.Tensor) -> None:
        """Write a packed section (uint8, contiguous) and its checksum."""
        experts, file = self._manifest.experts, self._files[key.layer]
        slice_place, begins = self._places[key.layer][key.bits], self._begins[key.layer]
        data = packed.numpy().data
        begin = begins[f"{slice_place.bits}bit.blobs"] + key.expert * slice_place.stride
        begin += slice_place.start + experts.format(key).sections[projection].start
        with self.refusals():
            write_at(file, data, begin)
            number = (key.expert * slice_place.slices + slice_place.number) * len(Projection) + projection
            place = begins[f"{slice_place.bits}bit.xxh3"] + number * 8
            write_at(file, checksum(data).to_bytes(8, "little", signed=True), place)

    def sync(self, layer: int) -> None:
        """Make what was written for one layer durable; ``leave`` keeps it."""
        with self.refusals():
            os.fsync(self._files[layer])
        self._continuable = True

    def finish(self, errors: ErrorRecord | None = None, *, overwrite: bool = False) -> FileStore:
        """Sync everything, give the folder its name, and open it.

        ``overwrite`` replaces even an equal store; otherwise a store that another process published first stays.
        StoreError if the disk refuses.
        """
        with self.refusals():
            shards, manifest = {}, replace(self._manifest, errors=errors)
            for layer_index, file in zip(manifest.experts.layers, self._files, strict=True):
                os.fsync(file)
                path = self.partial / file_name(layer_index)
                shards[layer_index] = digest_of(manifest, layer_index, file, read_header(path, file))
            write_manifest(self.partial / MANIFEST, replace(manifest, shards=shards))
            self._close_files()
            sync_folder(self.partial)
            self._publish(overwrite)
            self.close()
        with contextlib.suppress(OSError):
            (self._folder / JOURNAL).unlink()  # until here another writer could have continued
        return FileStore(self._folder)

    def close(self) -> None:
        """Close the files; the temporary folder stays."""
        self._close_files()
        if self._lock >= 0:
            close_file(self._lock)
            self._lock = -1

    def _close_files(self) -> None:
        while self._files:
            close_file(self._files.pop())

    def leave(self) -> None:
        """Stop; what another writer can continue stays, everything else is removed."""
        if self._continuable:
            self.close()
        else:
            self.discard()

    @property
    def kept(self) -> str:
        """A sentence about what ``leave`` keeps, for error messages; may be empty."""
        if not self._continuable:
            return ""
        return f" What is packed stays in {self.partial}, and the next run continues with it."

    def discard(self) -> None:
        """Remove everything written so far; does nothing after ``finish``."""
        self._close_files()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.close()  # from now on another writer may have it

    def _publish(self, overwrite: bool) -> None:
        try:
            publish(self.partial, self._folder)
        except OSError:
            if not (self._folder / MANIFEST).is_file():
                raise
            if overwrite or not self._is_published():
                replace_folder(self.partial, self._folder)
            else:
                shutil.rmtree(self.partial)
        sync_folder(self._folder.parent)

    def _is_published(self) -> bool:
        """Return whether the same store is published already.

        StoreError if that cannot be determined.
        """
        try:
            store = FileStore(self._folder)
        except DamagedStoreError:
            return False
        store.close()
        return store.manifest == self._manifest

    def _check_space(self, needed: int) -> None:
        """Raise StoreError if the disk is too small for what is not written yet."""
        rest = needed - disk_bytes(self.partial.rglob("*"))
        free = shutil.disk_usage(self.partial).free
        if free >= rest:
            return
        what = f"the rest of {self._folder}" if self._continuable else self._folder
        others = (
            f" {left} takes {size(disk_bytes(left.rglob('*')))}; remove it if nothing is writing it."
            for left in leftovers(self._folder)
            if left != self.partial
        )
        raise StoreError(f"{what} {too_small(rest, free)}; {self._advice}.{self.kept}{''.join(others)}")

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn an OSError into a StoreError that says what the user can do."""
        try:
            yield
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StoreError:
        return StoreError(f"{self._folder} cannot be written: {error.strerror}; {self._advice}.{self.kept}")
