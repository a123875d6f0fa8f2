"""Writing a store so that it is either complete or not there.

Sections are written at their final offsets into shards in a temporary folder
beside the final one. Publishing checksums, syncs and renames it. A crash leaves
a temporary folder that the next writer removes, or puts back if it is what was
to be replaced. Of two processes that write the same store the second finds the
first one's and uses it.
"""

import contextlib
import glob
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from vllm_dymoe.experts.layout import BlobKey, Projection
from vllm_dymoe.store.base import StoreError
from vllm_dymoe.store.files import FileStore, checksum, file_name
from vllm_dymoe.store.manifest import MANIFEST, ErrorRecord, Manifest
from vllm_dymoe.units import too_small

# Data begins on a page.
_DATA_ALIGNMENT = 4096
_TEMPORARY = ".partial-"
_REPLACED = "-replaced"


class ShardFiles:
    """The shards of one store, written into a folder that exists.

    What the disk refuses is raised as OSError: whoever made the folder knows what to tell the user.

    Args:
        folder: where the shards go.
        manifest: what they will hold.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._layout = _Layout(manifest)
        self._files: list[int] = []
        try:
            for layer_index in manifest.experts.layers:
                file = os.open(folder / file_name(layer_index), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._files.append(file)
                os.pwrite(file, self._layout.header, 0)
                os.ftruncate(file, self._layout.size)
        except OSError:
            self.close()
            raise

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Write a part of one packed section (uint8, contiguous) and the section's checksum so far at their offsets.

        A part that begins at a byte ``start`` of the section comes after the part that ends there.
        """
        file = self._files[key.layer]
        section = self._manifest.experts.formats[key.bits].sections[projection]
        _pwrite(file, part.numpy().data, self._layout.blob_offset(key) + section.start + start)
        place = self._layout.checksum_offset(key, projection)
        written = part.numpy().data
        if start:
            offset = self._layout.blob_offset(key) + section.start
            written = memoryview(os.pread(file, start + len(written), offset))
        _pwrite(file, memoryview(checksum(written).to_bytes(8, "little", signed=True)), place)

    def sync(self, layer: int) -> None:
        """Make what is written of one layer durable."""
        os.fsync(self._files[layer])

    def finish(self, errors: ErrorRecord | None = None) -> None:
        """Sync the shards, then write the manifest that declares them complete, with the errors in it."""
        while self._files:
            file = self._files.pop()
            try:
                os.fsync(file)
            finally:
                os.close(file)
        write_manifest(self._folder, replace(self._manifest, errors=errors))

    def close(self) -> None:
        """Close the files, complete or not."""
        while self._files:
            os.close(self._files.pop())


class ShardWriter:
    """Writes one store into a temporary folder and gives it its name when it is complete.

    Args:
        folder: final place of the store.
        manifest: what it will hold.

    Raises:
        StoreError: the folder cannot be written, or the disk is too small.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._shards: ShardFiles | None = None
        needed = sum(manifest.experts.nbytes(bits) for bits in manifest.experts.formats)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder.parent).free
            if free < needed:
                raise StoreError(
                    f"the expert store in {folder} {too_small(needed, free)}; "
                    "free some space or set store_dir to another disk."
                )
            self.partial = make_partial(folder)
            self._shards = ShardFiles(self.partial, manifest)
        except OSError as error:
            self.discard()
            raise StoreError(
                f"the expert store cannot be written to {folder}: {error.strerror}; set store_dir to a folder that can."
            ) from error

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Write a part of one packed section at its offset; see :meth:`ShardFiles.write`.

        Raises:
            StoreError: the disk refuses.
        """
        assert self._shards is not None, "the store is published or discarded already"
        try:
            self._shards.write(key, projection, part, start)
        except OSError as error:
            self.discard()
            raise StoreError(
                f"writing the expert store to {self.folder} failed: {error.strerror}; "
                "free some space or set store_dir to another disk."
            ) from error

    def publish(self, errors: ErrorRecord | None = None) -> Path:
        """Sync everything and give the folder its name.

        Args:
            errors: for the manifest.

        Returns:
            The folder: this one, or the one that another process published first.

        Raises:
            StoreError: the disk refuses.
        """
        assert self._shards is not None, "the store is published or discarded already"
        try:
            self._shards.finish(errors)
            _rename_into_place(self.partial, self.folder)
        except OSError as error:
            self.discard()
            raise StoreError(
                f"the expert store cannot be completed in {self.folder}: {error.strerror}; "
                "free some space or set store_dir to another disk."
            ) from error
        return self.folder

    def discard(self) -> None:
        """Remove everything written so far."""
        if self._shards is not None:
            self._shards.close()
            self._shards = None
        if hasattr(self, "partial"):
            shutil.rmtree(self.partial, ignore_errors=True)


class _Layout:
    """Offsets inside one shard; all shards are alike."""

    def __init__(self, manifest: Manifest) -> None:
        experts = manifest.experts
        self._blobs: dict[int, tuple[int, int]] = {}  # bits -> first byte, bytes per blob
        self._checksums: dict[int, int] = {}
        tensors: dict[str, object] = {}
        end = 0

        def place(name: str, dtype: str, shape: list[int], itemsize: int) -> int:
            nonlocal end
            begin, end = end, end + math.prod(shape) * itemsize
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            return begin

        # All blobs come first: their sizes are multiples of 256, so that each of them is aligned to that.
        for bits, fmt in experts.formats.items():
            begin = place(f"{bits}bit.blobs", "U8", [experts.num_experts, fmt.nbytes], 1)
            self._blobs[bits] = (begin, fmt.nbytes)
        for bits in experts.formats:
            self._checksums[bits] = place(f"{bits}bit.xxh3", "I64", [experts.num_experts, len(Projection)], 8)
        text = json.dumps({"__metadata__": {"format": "vllm-dymoe experts"}, **tensors}).encode()
        padded = -(-(8 + len(text)) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT - 8
        self.header = padded.to_bytes(8, "little") + text.ljust(padded)
        self.size = len(self.header) + end

    def blob_offset(self, key: BlobKey) -> int:
        begin, nbytes = self._blobs[key.bits]
        return len(self.header) + begin + key.expert * nbytes

    def checksum_offset(self, key: BlobKey, projection: Projection) -> int:
        return len(self.header) + self._checksums[key.bits] + (key.expert * len(Projection) + projection) * 8


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and sync it and its folder."""
    path = folder / MANIFEST
    with path.open("w") as file:
        json.dump(manifest.to_json(), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def make_partial(folder: Path, resume: Callable[[Path], bool] = lambda leftover: False) -> Path:
    """Make the temporary folder beside ``folder``, after removing what writers that died on this host left there.

    Args:
        folder: the final one.
        resume: says which leftover to go on with; it becomes the temporary folder.
    """
    partial = Path(tempfile.mkdtemp(prefix=f"{_prefix(folder)}{os.getpid()}-", dir=folder.parent))
    for leftover in _left_by_the_dead(folder):
        if resume(leftover) and not any(partial.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                os.rename(leftover, partial)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    partial.chmod(0o755)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a complete temporary folder the name of another one, which is removed afterwards."""
    replaced = partial.with_name(f"{partial.name}{_REPLACED}")
    os.rename(folder, replaced)
    try:
        os.rename(partial, folder)
    except OSError:
        os.rename(replaced, folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo what a writer that died between the two renames of ``replace_folder`` has done."""
    if not folder.exists():
        for leftover in _left_by_the_dead(folder):
            if leftover.name.endswith(_REPLACED):
                os.rename(leftover, folder)
                return


def _prefix(folder: Path) -> str:
    return f"{folder.name}{_TEMPORARY}{socket.gethostname()}-"


def _left_by_the_dead(folder: Path) -> Iterator[Path]:
    """Temporary folders beside ``folder`` of processes on this host that have ended."""
    prefix = _prefix(folder)
    for leftover in list(folder.parent.glob(f"{glob.escape(prefix)}*")):
        pid = leftover.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield leftover


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_into_place(partial: Path, folder: Path) -> None:
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        if _is_complete(folder, Manifest.read(partial)):
            shutil.rmtree(partial)  # another process was first; its store is the same
        else:
            replace_folder(partial, folder)
    sync_folder(folder.parent)


def _is_complete(folder: Path, manifest: Manifest) -> bool:
    try:
        store = FileStore(folder)
    except StoreError:
        return False
    store.close()
    return store.manifest == manifest


def _pwrite(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
