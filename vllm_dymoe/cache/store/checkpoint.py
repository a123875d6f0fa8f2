"""16-bit experts in a checkpoint's own files, without a second copy.

A packed expert at 16 bits is its matrices [rows, columns], one after the other. So each of its sections is a tensor of
the checkpoint, wherever that is. A CPU cannot compute from such files in place, because the three matrices of an expert
need not be adjacent there.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_dymoe.cache.store.base import DamagedStoreError
from vllm_dymoe.cache.store.files import FileStore, Piece, Stamp, cannot_read, check_descriptors
from vllm_dymoe.cache.store.header import TensorPlace
from vllm_dymoe.cache.store.manifest import Manifest
from vllm_dymoe.durable import open_regular
from vllm_dymoe.experts.format import EVERY_PROJECTION, Projection, SliceKey

Places = Mapping[tuple[int, int, Projection], TensorPlace]
"""By position of the layer, expert and projection."""

_SAMPLE_BYTES = 512  # of each matrix


class CheckpointStore(FileStore):
    """Reads 16-bit experts from a checkpoint.

    The files have no checksums, for vLLM as for us. One that is written to while it is served is an error, because
    nothing tells which of its bytes are still the model's.

    Args:
        manifest: describes the experts, as a copy of them would.
        places: of every section; each has as many bytes as the section, and its dtype.
    """

    def __init__(self, folder: Path, manifest: Manifest, places: Places) -> None:
        self._prepare(folder, manifest, manifest.experts)
        self.unmapped = "the matrices of an expert are separate tensors of the checkpoint"
        self._places = places
        self._in_file: dict[Path, list[tuple[int, TensorPlace]]] = {}  # with each matrix its expert
        of_layers: list[set[Path]] = [set() for _ in self.experts.layers]
        for (layer, expert, _), place in places.items():
            self._in_file.setdefault(place.path, []).append((expert, place))
            of_layers[layer].add(place.path)
        self._paths = [sorted(paths) for paths in of_layers]
        check_descriptors(folder, len(self._in_file))
        self._files: dict[Path, int] = {}
        self._opened: dict[Path, tuple[Stamp, bytes]] = {}  # and a sample of each file
        try:
            for path in sorted(self._in_file):
                self._files[path] = open_regular(path)
                self._descriptors.append(self._files[path])
                self._opened[path] = Stamp.of(self._files[path]), self._sample(path)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise cannot_read(path, error) from error
            raise

    @property
    def description(self) -> str:
        return f"the checkpoint's own files in {self.folder}{self.reading.description}"

    @property
    def mapped(self) -> bool:
        return False

    def check(self, key: SliceKey, read: torch.Tensor, projections: range = EVERY_PROJECTION) -> None:
        """Do nothing: a checkpoint has no checksums."""

    def _pieces(self, key: SliceKey, projections: range) -> list[Piece]:
        places = (self._places.get((key.layer, key.expert, Projection(number))) for number in projections)
        return [Piece(place.path, self._files[place.path], place.begin, place.nbytes) for place in places if place]

    def _look(self, layer: int) -> None:
        for path in self._paths[layer]:
            before, sample = self._opened[path]
            try:
                now = Stamp.of(self._files[path])
            except OSError as error:
                raise cannot_read(path, error) from error
            if now == before:
                continue
            # Other modes, owners, names and links, and a removal, change the time of the last change only.
            if now._replace(changed=before.changed) != before or self._sample(path) != sample:
                raise DamagedStoreError(f"{path} has changed since it was opened; {self._again}.")
            self._opened[path] = now, sample

    def _sample(self, path: Path) -> bytes:
        """Return a digest of the middle of each matrix in a file.

        StoreError if it cannot be read.
        """
        digest, buffer = hashlib.sha256(), torch.empty(_SAMPLE_BYTES, dtype=torch.uint8)
        for expert, place in self._in_file[path]:
            nbytes = min(_SAMPLE_BYTES, place.nbytes)
            piece = Piece(path, self._files[path], place.begin + (place.nbytes - nbytes) // 2, nbytes)
            self._read(piece, buffer[:nbytes], expert, wait=True)
            digest.update(buffer[:nbytes].numpy().data)
        return digest.digest()

    @property
    def _again(self) -> str:
        return "download the checkpoint again if it is damaged, and restart the server"
