"""From a checkpoint's 16-bit projections to packed blobs, one projection at a time.

Whoever loads a checkpoint calls :meth:`ExpertPacker.put` with each projection in
whatever order the checkpoint has them. It is quantized at every stored bit-width
and goes straight to its place, so nothing bigger than one projection is ever
unpacked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from vllm_dymoe.experts.layout import ModelExperts, Projection
from vllm_dymoe.experts.store import BlobKey, FileStore, HostStore, Manifest, MemoryStore, StoreError
from vllm_dymoe.quantize.base import Quantizer, quantize_matrix
from vllm_dymoe.quantize.shards import ShardWriter


class Sink(Protocol):
    """Where packed sections go."""

    def write(self, key: BlobKey, projection: Projection, section: torch.Tensor) -> None:
        """Take one packed projection: uint8 [section bytes]."""
        ...

    def finish(self) -> HostStore:
        """Complete the store and open it for reading."""
        ...


class MemorySink:
    """Into host memory."""

    def __init__(self, experts: ModelExperts, *, pin: bool) -> None:
        self._store = MemoryStore(experts, pin=pin)

    def write(self, key: BlobKey, projection: Projection, section: torch.Tensor) -> None:
        """Copy the section into its blob."""
        place = self._store.experts.formats[key.bits].sections[projection]
        self._store.blob(key)[place].copy_(section)

    def finish(self) -> HostStore:
        """The store itself."""
        return self._store


class FileSink:
    """Into shards in a temporary folder, which gets its name when it is complete."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._writer = ShardWriter(folder, manifest)

    def write(self, key: BlobKey, projection: Projection, section: torch.Tensor) -> None:
        """Write the section at its offset."""
        self._writer.write(key, projection, section)

    def finish(self) -> HostStore:
        """Publish the folder and open it."""
        return FileStore(self._writer.publish())


class ExpertPacker:
    """Quantizes projections into a sink and knows which are still missing.

    Args:
        experts: what the store will hold.
        quantizer: used for every bit-width below 16.
        sink: where sections go.
        progress: called after each projection.
    """

    def __init__(
        self,
        experts: ModelExperts,
        quantizer: Quantizer,
        sink: Sink,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.experts = experts
        self._quantizer = quantizer
        self._sink = sink
        self._progress = progress
        self._missing = {
            (layer, expert, projection)
            for layer in range(len(experts.layers))
            for expert in range(experts.num_experts)
            for projection in Projection
        }
        self._scratch = {
            (bits, projection): torch.empty(fmt.matrices[projection].nbytes, dtype=torch.uint8)
            for bits, fmt in experts.formats.items()
            for projection in Projection
        }

    def put(self, layer: int, expert: int, projection: Projection, weight: torch.Tensor) -> None:
        """Quantize one projection at every stored bit-width.

        Args:
            layer: position of the MoE layer.
            expert: local index.
            projection: which matrix.
            weight: [rows, columns], already this rank's slice.

        Raises:
            StoreError: the shape is not the model's, or the weights are not finite.
        """
        name = f"{projection.name.lower()} projection of expert {expert} in layer {self.experts.layers[layer]}"
        for bits, fmt in self.experts.formats.items():
            matrix = fmt.matrices[projection]
            if tuple(weight.shape) != (matrix.rows, matrix.columns):
                raise StoreError(
                    f"the {name} has shape {list(weight.shape)} in the checkpoint, "
                    f"but the model's configuration says {[matrix.rows, matrix.columns]}."
                )
            section = self._scratch[bits, projection]
            try:
                quantize_matrix(weight, matrix, self._quantizer, section)
            except ValueError as error:
                raise StoreError(f"the {name} cannot be quantized to {bits} bits: {error}") from error
            self._sink.write(BlobKey(layer, expert, bits), projection, section)
        self._missing.discard((layer, expert, projection))
        self._progress()

    def finish(self) -> HostStore:
        """Complete the store.

        Raises:
            StoreError: the checkpoint did not hold every projection.
        """
        if self._missing:
            layer, expert, projection = min(self._missing)
            raise StoreError(
                f"the checkpoint lacks {len(self._missing)} expert projections, the first being the "
                f"{projection.name.lower()} projection of expert {expert} in layer {self.experts.layers[layer]}; "
                "download it again."
            )
        return self._sink.finish()
