"""16-bit experts in a checkpoint's own files, without a second copy.

A packed expert at 16 bits is its matrices [rows, columns], one after the other. So each of its sections is a tensor of
the checkpoint, wherever that is. A CPU cannot compute from such files in place, because the three matrices of an expert
need not be adjacent there.
"""

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


class CheckpointStore(FileStore):
    """Reads 16-bit experts from a checkpoint.

    The files have no checksums, for vLLM as for us. One that changes while it is served is an error, because nothing
    tells which of its bytes are still the model's.

    Args:
        manifest: describes the experts, as a copy of them would.
        places: of every section; each has as many bytes as the section, and its dtype.
    """

    def __init__(self, folder: Path, manifest: Manifest, places: Places) -> None:
        self._prepare(folder, manifest, manifest.experts)
        self.unmapped = "the matrices of an expert are separate tensors of the checkpoint"
        paths = sorted({place.path for place in places.values()})
        check_descriptors(folder, len(paths))
        self._files: dict[Path, int] = {}
        try:
            for path in paths:
                self._files[path] = open_regular(path)
                self._descriptors.append(self._files[path])
        except OSError as error:
            self.close()
            raise cannot_read(path, error) from error
        self._places = places
        of_layers: list[set[Path]] = [set() for _ in self.experts.layers]
        for (layer, _, _), place in places.items():
            of_layers[layer].add(place.path)
        self._opened = {path: Stamp.of(file) for path, file in self._files.items()}
        self._paths = [sorted(paths) for paths in of_layers]

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
            try:
                now = Stamp.of(self._files[path])
            except OSError as error:
                raise cannot_read(path, error) from error
            if now != self._opened[path]:
                raise DamagedStoreError(f"{path} has changed since it was opened; {self._again}.")

    @property
    def _again(self) -> str:
        return "download the checkpoint again if it is damaged, and restart the server"
