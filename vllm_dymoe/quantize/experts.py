"""From a checkpoint's projections to packed blobs, one projection at a time.

Whoever loads a checkpoint calls :meth:`ExpertPacker.put` with each projection in
whatever order the checkpoint has them. It is quantized at every stored bit-width
and goes straight to its place, so nothing bigger than one projection is ever
unpacked. What the checkpoint has at one of these bit-widths already is taken as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from vllm_dymoe.experts.layout import BlobKey, ModelExperts, Projection
from vllm_dymoe.kernels import MatrixFormat
from vllm_dymoe.quantize.base import Codes, Quantizer, pack_bias, quantize_matrix
from vllm_dymoe.quantize.errors import ErrorTally
from vllm_dymoe.quantize.gptq import Curvature, Gptq
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix, check_held
from vllm_dymoe.store import ErrorRecord, FileStore, HostStore, Manifest, MemoryStore, StoreError
from vllm_dymoe.store.writer import ShardWriter


class Sink(Protocol):
    """Where packed sections go."""

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Take a part of one packed projection.

        Args:
            key: which blob.
            projection: which section of it.
            part: uint8, the section from ``start`` on.
            start: 0, or the byte where the part before this one ended.
        """
        ...

    def finish(self, errors: ErrorRecord | None = None) -> HostStore:
        """Complete the store and open it for reading.

        Args:
            errors: for its manifest.
        """
        ...

    def discard(self) -> None:
        """Remove what was written."""
        ...


class MemorySink:
    """Into host memory that no device copies from, for tests and measurements."""

    def __init__(self, experts: ModelExperts) -> None:
        self._store = MemoryStore(experts)

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Copy the part into its blob."""
        section = self._store.blob(key)[self._store.experts.formats[key.bits].sections[projection]]
        section[start : start + part.numel()].copy_(part)

    def finish(self, errors: ErrorRecord | None = None) -> HostStore:
        """The store itself, which has no manifest."""
        return self._store

    def discard(self) -> None:
        """Give the memory back."""
        self._store.close()


class FileSink:
    """Into shards in a temporary folder, which gets its name when it is complete."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._writer = ShardWriter(folder, manifest)

    def write(self, key: BlobKey, projection: Projection, part: torch.Tensor, start: int = 0) -> None:
        """Write the part at its offset."""
        self._writer.write(key, projection, part, start)

    def finish(self, errors: ErrorRecord | None = None) -> HostStore:
        """Publish the folder and open it."""
        return FileStore(self._writer.publish(errors))

    def discard(self) -> None:
        """Remove the temporary folder."""
        self._writer.discard()


class ExpertPacker:
    """Quantizes projections into a sink and knows which are still missing.

    Args:
        experts: what the store will hold.
        quantizer: used for every bit-width below 16.
        sink: where sections go.
        progress: called after each projection.
        errors: where errors are counted; several packers can share it.
    """

    def __init__(
        self,
        experts: ModelExperts,
        quantizer: Quantizer,
        sink: Sink,
        progress: Callable[[], None] = lambda: None,
        errors: ErrorTally | None = None,
    ) -> None:
        self.experts = experts
        self._errors = errors or ErrorTally(experts)
        self._quantizer = quantizer
        self._sink = sink
        self._progress = progress
        self._missing = {
            (layer, expert, projection)
            for layer in range(len(experts.layers))
            for expert in range(experts.num_experts)
            for projection in Projection
        }
        with_bias = any(fmt.bias for fmt in experts.formats.values())
        self._missing_biases = set(self._missing) if with_bias else set()
        self._early_biases: dict[tuple[int, int, Projection], torch.Tensor] = {}
        self._orders: dict[tuple[BlobKey, Projection], torch.Tensor] = {}  # of columns, until the bias is there
        self._scratch = {
            (bits, projection): torch.empty(fmt.matrices[projection].nbytes, dtype=torch.uint8)
            for bits, fmt in experts.formats.items()
            for projection in Projection
        }

    def put(
        self,
        layer: int,
        expert: int,
        projection: Projection,
        weight: torch.Tensor | PrequantizedMatrix,
        curvature: Curvature | None = None,
    ) -> None:
        """Quantize one projection at every stored bit-width.

        Args:
            layer: position of the MoE layer.
            expert: local index.
            projection: which matrix.
            weight: [rows, columns], already this rank's slice. Codes go into the version of their bits as they are; the
                others are quantized from what the codes stand for.
            curvature: of its inputs, for GPTQ in place of the packer's quantizer.

        Raises:
            StoreError: the shape is not the model's, the weights are not finite, or codes cannot be held as they are.
        """
        name = self._name(layer, expert, projection)
        quantizer = self._quantizer if curvature is None else Gptq(curvature)
        for bits, fmt in self.experts.formats.items():
            matrix = fmt.matrices[projection]
            if tuple(weight.shape) != (matrix.rows, matrix.columns):
                raise StoreError(
                    f"the {name} has shape {list(weight.shape)} in the checkpoint, "
                    f"but the model's configuration says {[matrix.rows, matrix.columns]}."
                )
            section = self._scratch[bits, projection]
            taken = isinstance(weight, PrequantizedMatrix) and bits == weight.bits
            try:
                plain, codes = _pack(weight, matrix, quantizer, section)
            except ValueError as error:
                what = f"{'taken as it is at' if taken else 'quantized to'} {bits} bits"
                raise StoreError(f"the {name} cannot be {what}: {error}") from error
            if plain is not None and codes is not None:
                self._errors.add((layer, expert, projection), plain, codes, matrix, curvature)
            key = BlobKey(layer, expert, bits)
            self._sink.write(key, projection, section[: matrix.bias_offset if fmt.bias else matrix.nbytes])
            if fmt.bias and fmt.act_order:
                self._orders[key, projection] = section[matrix.order_offset :].clone()
        place = (layer, expert, projection)
        self._missing.discard(place)
        self._progress()
        if place in self._early_biases:
            self.put_bias(*place, self._early_biases.pop(place))

    def put_bias(self, layer: int, expert: int, projection: Projection, bias: torch.Tensor) -> None:
        """Store the bias of one projection, before or after its weight.

        Args:
            layer: position of the MoE layer.
            expert: local index.
            projection: which matrix.
            bias: [rows], already this rank's.

        Raises:
            StoreError: the shape is not the model's, or the values are not finite.
        """
        place = (layer, expert, projection)
        if place in self._missing:  # a checksum covers weight, bias and order of columns in this order
            self._early_biases[place] = bias.clone()
            return
        for bits, fmt in self.experts.formats.items():
            matrix = fmt.matrices[projection]
            try:
                packed = pack_bias(bias, matrix, self._scratch[bits, projection])
            except ValueError as error:
                raise StoreError(f"the bias of the {self._name(*place)} cannot be stored: {error}") from error
            key = BlobKey(layer, expert, bits)
            self._sink.write(key, projection, packed, matrix.bias_offset)
            if fmt.act_order:
                self._sink.write(key, projection, self._orders.pop((key, projection)), matrix.order_offset)
        self._missing_biases.discard(place)

    def finish(self) -> HostStore:
        """Complete the store.

        Raises:
            StoreError: the checkpoint did not hold every projection.
        """
        for missing, what in ((self._missing, "expert projections"), (self._missing_biases, "biases of experts")):
            if missing:
                raise StoreError(
                    f"the checkpoint lacks {len(missing)} {what}, the first being that of the "
                    f"{self._name(*min(missing))}; download it again."
                )
        return self._sink.finish(self._errors.record())

    def _name(self, layer: int, expert: int, projection: Projection) -> str:
        return f"{projection.name.lower()} projection of expert {expert} in layer {self.experts.layers[layer]}"

    def discard(self) -> None:
        """Give up: remove what was written."""
        self._sink.discard()


def _pack(
    weight: torch.Tensor | PrequantizedMatrix, matrix: MatrixFormat, quantizer: Quantizer, section: torch.Tensor
) -> tuple[torch.Tensor | None, Codes | None]:
    """Write one section; what was quantized and to which codes, or None where nothing was."""
    if isinstance(weight, PrequantizedMatrix):
        if matrix.bits == weight.bits:
            weight.pack(matrix, section)
            return None, None
        check_held(weight.scales, matrix.dtype)
        weight = weight.dequantize()
    return weight, quantize_matrix(weight, matrix, quantizer, section)
