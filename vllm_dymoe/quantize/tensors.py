"""Finds the tensors of a checkpoint, and copies some of them.

Copies are made byte for byte, into shards of our own.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.cache.store.header import TensorPlace, make_header, read_header
from vllm_dymoe.durable import open_regular, read_regular, write_synced

INDEX = "model.safetensors.index.json"

_SHARD_BYTES = 5 * 10**9
_PIECE_BYTES = 16 * 2**20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written.

    The message is one sentence for the user.
    """


def read_tensors(folder: Path) -> dict[str, TensorPlace]:
    """Return every tensor of a checkpoint.

    Raises CheckpointError if there is none, if a file is damaged, or if one exists twice.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors files; other formats are not supported.")
    tensors: dict[str, TensorPlace] = {}
    for path in files:
        for name, place in read_places(path).items():
            if name in tensors:
                raise CheckpointError(f"{name} is both in {tensors[name].path} and in {path}.")
            tensors[name] = place
    return tensors


def check_files(folder: Path) -> list[TensorPlace]:
    """Return all tensors of a checkpoint.

    Raises CheckpointError if a safetensors file is missing or shorter than its header says.
    """
    return [place for path in weight_files(folder) for place in read_places(path).values()]


def copy_tensors(tensors: Iterable[TensorPlace], folder: Path, progress: Callable[[int], None]) -> None:
    """Copy tensors into synced shards ``model-00001-of-0000n.safetensors``.

    An index keeps other files out of vLLM's loader. ``progress`` gets the bytes done. Raises CheckpointError if a
    source file ends early.
    """
    # Wide elements first, so that each tensor is aligned to its own size; then in the order of the sources.
    shards: list[list[TensorPlace]] = [[]]
    size = total = 0
    widths = {place: place.nbytes // max(1, math.prod(place.shape)) for place in tensors}
    for place in sorted(widths, key=lambda place: (-widths[place], place.path, place.begin)):
        if shards[-1] and size + place.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size += place.nbytes
        total += place.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {place.name: file_name for place in shard}
        _write_shard(folder / file_name, shard, progress)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_synced(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the checkpoint's index names, else all of them."""
    index = folder / INDEX
    if index.exists() or index.is_symlink():
        try:
            names = sorted(set(json.loads(read_regular(index))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} cannot be read ({error!r}); download it again.") from error
        if foreign := [name for name in names if not _is_inside(name)]:
            raise CheckpointError(
                f"{index} names {foreign[0]!r}, which is not a file of that folder; download the checkpoint again, or "
                "correct the index."
            )
        return [folder / name for name in names]
    # Mistral's repositories contain the same weights a second time under this name.
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))


def check_own_files(folder: Path, files: Iterable[Path], *, hub: bool = False) -> None:
    """Raise CheckpointError for a link that leads out of a checkpoint.

    Its target would be copied, published or served. A snapshot of the Hugging Face hub has links to the blobs next to
    it, which belong to it. With ``hub`` other blobs of the hub's cache are allowed, too: `hf download --local-dir`
    linked to them before huggingface_hub 0.23.
    """
    whole, roots = folder.resolve(), [folder.resolve()]
    if whole.parent.name == "snapshots":
        roots.append(whole.parent.parent / "blobs")
    for path in files:
        real = path.resolve()
        blob = hub and real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
        if not blob and not any(real.is_relative_to(root) for root in roots):
            raise CheckpointError(
                f"{path} is a link to {real}, which is not a file of the checkpoint; put a copy of it there, or remove "
                "the link."
            )


def _is_inside(name: object) -> bool:
    """Return whether a name in an index is inside the index's folder.

    Other names are not allowed.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def read_places(path: Path) -> dict[str, TensorPlace]:
    """Return the tensors of one file, by name.

    Raises CheckpointError if it is damaged, or a dangling link.
    """
    try:
        file = open_regular(path)
        try:
            return read_header(path, file)
        finally:
            os.close(file)
    except (OSError, StoreError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again.") from error


def _write_shard(path: Path, tensors: Sequence[TensorPlace], progress: Callable[[int], None]) -> None:
    described = [(place.name, place.dtype, place.shape, place.nbytes) for place in tensors]
    header, _, _ = make_header(described, {"format": "pt"})
    with path.open("wb") as target:
        target.write(header)
        for place in tensors:
            with place.path.open("rb") as source:
                source.seek(place.begin)
                left = place.nbytes
                while left:
                    piece = source.read(min(left, _PIECE_BYTES))
                    if not piece:
                        raise CheckpointError(f"{place.path} was truncated while it was read; download it again.")
                    target.write(piece)
                    left -= len(piece)
                    progress(len(piece))
        target.flush()
        os.fsync(target.fileno())
