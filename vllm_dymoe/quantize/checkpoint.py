"""Reading a local Hugging Face checkpoint of a Mixture-of-Experts model, 16-bit or quantized, without vLLM.

Headers say where every tensor lies, so that whatever cannot work is refused before a byte is read.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_dymoe.quantize.held import Held, Matrix
from vllm_dymoe.quantize.model_config import INTERMEDIATE, NUM_EXPERTS, TOP_K, ModelConfig
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.readers.compatibility import format_fields
from vllm_dymoe.quantize.tensor_names import ExpertName, Stacking, read_name
from vllm_dymoe.quantize.tensors import CheckpointError, read_tensors
from vllm_dymoe.residency.format import Format, ModelExperts, Projection, stored_formats
from vllm_dymoe.store.header import TensorPlace

_HIDDEN = ("moe_latent_size", "hidden_size")
_WITHOUT_GATE = frozenset(("nemotron_h",))
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of one matrix: of one expert, or of all experts of a layer in a stack.

    Attributes:
        layer: index of the layer in the model.
        expert: which one; None for a stack.
        projections: what its rows are.
        parts: by the ends of their names, "weight" and "bias", or what a quantized checkpoint has.
    """

    layer: int
    expert: int | None
    projections: tuple[Projection, ...]
    parts: Mapping[str, TensorPlace]

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(place.nbytes for place in self.parts.values())


class Checkpoint:
    """One local checkpoint folder; reading experts is safe from several threads.

    Attributes:
        dense: every tensor that is not of an expert, by name.
        reader: of experts that another tool has quantized; None if they have 16 bits.
        left_out: tensors of layers beyond the model's last (multi-token prediction), which vLLM's model does not load.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = ModelConfig(folder)
        quantization = self.config.quantization
        self.reader = None if quantization is None else make_reader(quantization)
        tensors = read_tensors(folder)
        self.dense: dict[str, TensorPlace] = {}
        self.left_out: dict[str, TensorPlace] = {}
        self._stacking = Stacking.of(self.config.model_type)
        self._files: dict[Path, Any] = {}
        stack, beyond = self._stack_of_experts(tensors)
        found: dict[tuple[int, int | None, tuple[Projection, ...]], dict[str, TensorPlace]] = {}
        for name, place in tensors.items():
            layer = re.match(rf"{re.escape(stack)}\.(\d+)\.", name)
            if layer is not None and int(layer[1]) >= beyond:
                self.left_out[name] = place
            elif (named := read_name(name)) is None:
                self.dense[name] = place
            else:
                if self.reader is not None:
                    named = replace(named, part=self.reader.spellings.get(named.part, named.part))
                self._check_known(named, place)
                parts = found.setdefault((named.layer, named.expert, named.projections), {})
                if named.part in parts:
                    raise CheckpointError(f"expert {named.expert} of {name} in {folder} is there twice.")
                parts[named.part] = place
        self.experts = [ExpertTensors(*matrix, parts) for matrix, parts in found.items()]
        self._matrices = self._by_place()
        self._check_shapes()

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in the checkpoint."""
        return sum(self.layer_bytes)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the experts of each MoE layer in the checkpoint."""
        found = dict.fromkeys(self.layers, 0)
        for tensors in self.experts:
            found[tensors.layer] += tensors.nbytes
        return tuple(found.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything else."""
        return sum(place.nbytes for place in self.dense.values())

    @cached_property
    def dtype(self) -> torch.dtype:
        """What ``--dtype auto`` means: the checkpoint's own dtype, and bfloat16 for one of 32 bits, as in vLLM."""
        stored = sorted(place.dtype for place in self.experts[0].parts.values() if place.dtype in _DTYPES)
        dtype = self.config.dtype or (_DTYPES[stored[0]] if stored else torch.bfloat16)
        return torch.bfloat16 if dtype == torch.float32 else dtype

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        return tuple(sorted({tensors.layer for tensors in self.experts}))

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """Of every expert; some models' have no gate."""
        return tuple(Projection)[self.config.model_type in _WITHOUT_GATE :]

    @property
    def num_experts(self) -> int:
        """Experts in each layer."""
        return self.config.size(*NUM_EXPERTS)

    def model_experts(self, bits: tuple[int, ...], group_size: int, dtype: torch.dtype) -> ModelExperts:
        """What a store of this checkpoint holds.

        Args:
            bits: stored bit-widths, the high tier first.
            group_size: weights that share one scale and zero.
            dtype: of the scales, and of the weights at 16 bits.

        Raises:
            CheckpointError: config.json lacks a size, or the format cannot hold this model.
        """
        hidden, intermediate = self.config.size(*_HIDDEN), self.config.size(*INTERMEDIATE)
        biased = any("bias" in tensors.parts for tensors in self.experts)
        formats = stored_formats(
            bits,
            lambda width: Format(
                hidden, intermediate, group_size=group_size, dtype=dtype, bias=biased,
                has_gate=Projection.GATE in self.projections, **format_fields(self.reader, {}, width),
            ),
        )  # fmt: skip
        try:
            for fmt in formats.values():
                _ = fmt.nbytes
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the experts of {self.folder} cannot be packed: {error}.") from error
        return ModelExperts(self.layers, self.num_experts, self.config.size(*TOP_K), formats)

    def expert(self, position: int, expert: int) -> dict[Projection, Matrix]:
        """One expert, by projection.

        Raises:
            CheckpointError: a file cannot be read, or a tensor is not what config.json says.
        """
        return {projection: self._matrix(position, expert, projection) for projection in self.projections}

    def _matrix(self, position: int, expert: int, projection: Projection) -> Matrix:
        tensors = self._matrices[self.layers[position], expert, projection]
        parts = {part: self._read(tensors, part, expert, projection) for part in tensors.parts}
        bias = parts.pop("bias", None)
        return (parts["weight"] if self.reader is None else self._prequantized(tensors, projection, parts)), bias

    def _prequantized(self, tensors: ExpertTensors, projection: Projection, parts: Mapping[str, Tensor]) -> Held:
        assert self.reader is not None
        matrix = self._plain_format.matrices[projection]
        rows = matrix.rows * len(tensors.projections)
        try:
            held = self.reader.read(parts, rows, matrix.columns)
            if len(tensors.projections) == 1:
                return held
            which = self._stacking.rows(rows, tensors.projections)[tensors.projections.index(projection)]
            return held.part(0, which)
        except ValueError as error:
            stem = tensors.parts[self.reader.parts[0]].name.rpartition(".")[0]
            raise CheckpointError(f"{stem} in {self.folder} is no {self.reader.method} matrix: {error}") from error

    def _read(self, tensors: ExpertTensors, part: str, expert: int, projection: Projection) -> Tensor:
        place = tensors.parts[part]
        try:
            if place.path not in self._files:
                self._files[place.path] = safe_open(place.path, framework="pt")
            file = self._files[place.path]
            if tensors.expert is not None:
                found: Tensor = file.get_tensor(place.name)
                return found
            stacked: Tensor = file.get_slice(place.name)[expert]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{place.path} cannot be read ({error}); download it again.") from error
        if self.reader is not None and part in self.reader.parts:
            return stacked  # its reader knows how it lies
        return self._stacking.split(stacked, tensors.projections)[tensors.projections.index(projection)]

    def fingerprint(self) -> str:
        """Sixteen hex digits of the weights: names, shapes and a sample of each tensor (of each expert in a stack).

        Copying the folder does not change it, training the model further does.
        """
        digest = hashlib.sha256()
        files: dict[Path, int] = {}
        places = [*self.dense.values(), *(place for tensors in self.experts for place in tensors.parts.values())]
        try:
            for place in sorted(places, key=lambda place: place.name):
                if place.path not in files:
                    files[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                digest.update(f"{place.name} {place.dtype} {place.shape}".encode())
                parts = place.shape[0] if len(place.shape) == 3 else 1
                size = place.nbytes // max(1, parts)
                for part in range(parts):
                    middle = place.begin + part * size + max(0, size - _SAMPLE_BYTES) // 2
                    digest.update(os.pread(files[place.path], min(size, _SAMPLE_BYTES), middle))
        finally:
            for file in files.values():
                os.close(file)
        return digest.hexdigest()[:16]

    def _stack_of_experts(self, tensors: Mapping[str, TensorPlace]) -> tuple[str, int]:
        """Name of the one stack of layers with experts, and the index after the model's last layer."""
        stacks = {named.layers for name in tensors if (named := read_name(name))}
        if not stacks:
            raise CheckpointError(
                f"{self.folder} holds no tensor of an expert (layers.0.….experts.0.gate_proj.weight or the like); "
                "only Mixture-of-Experts models can be quantized here."
            )
        if len(stacks) > 1:
            raise CheckpointError(f"{self.folder} has experts in several places, {' and '.join(sorted(stacks))}.")
        return stacks.pop(), self.config.size("num_hidden_layers", "num_layers")

    def _check_known(self, named: ExpertName, place: TensorPlace) -> None:
        """Refuse a tensor of an expert that is neither a 16-bit weight nor a bias nor what the reader knows."""
        if self.reader is not None and named.projections and named.part in self.reader.known_parts:
            return
        method = self.reader.method if self.reader is not None else None
        if place.dtype not in _DTYPES or not named.projections or named.part not in ("weight", "bias"):
            raise CheckpointError(
                f"{place.name} ({place.dtype}, {list(place.shape)}) in {self.folder} belongs to experts but is not the "
                f"16-bit weight or bias of a gate, up or down projection{f' or its {method} codes' if method else ''}; "
                "other quantized experts are not supported yet."
            )
        if method is not None and named.part == "weight":
            raise CheckpointError(
                f"{place.name} in {self.folder} has 16 bits, although config.json says that the checkpoint is "
                f"quantized with {method}; a mix of both among the experts is not supported yet."
            )

    def _by_place(self) -> dict[tuple[int, int, Projection], ExpertTensors]:
        """Every projection by index of the layer and expert; refuses those that are missing, twice or in part there."""
        needed = ("weight",) if self.reader is None else self.reader.parts
        count = self.num_experts
        found: dict[tuple[int, int, Projection], ExpertTensors] = {}
        for tensors in self.experts:
            there = next(iter(tensors.parts.values())).name
            lacking = [part for part in needed if part not in tensors.parts]
            if lacking and tensors.parts.keys() != {"bias"}:
                raise CheckpointError(
                    f"{self.folder} has {there} but lacks {there.rpartition('.')[0]}.{lacking[0]}; "
                    "download the checkpoint again."
                )
            for expert in range(count) if tensors.expert is None else (tensors.expert,):
                for projection in tensors.projections:
                    if (tensors.layer, expert, projection) in found or expert >= count:
                        why = "is there twice" if expert < count else f"is one too many: config.json says {count}"
                        raise CheckpointError(f"expert {expert} of {there} in {self.folder} {why}.")
                    if not lacking:
                        found[tensors.layer, expert, projection] = tensors
        wanted = {(layer, expert, of) for layer in self.layers for expert in range(count) for of in self.projections}
        missing = sorted(wanted - found.keys())
        if missing:
            layer, expert, projection = missing[0]
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} projections of experts, the first being the "
                f"{projection.name.lower()} projection of expert {expert} in layer {layer}; download it again."
            )
        without = sum("bias" not in tensors.parts for tensors in self.experts)
        if 0 < without < len(self.experts):
            raise CheckpointError(
                f"{self.folder} has biases for some projections of its experts and not for {without} others; "
                "only models in which all of them or none have one can be quantized here."
            )
        return found

    @cached_property
    def _plain_format(self) -> Format:
        """Of one expert at 16 bits, for its shapes."""
        return self.model_experts((16,), 64, torch.bfloat16).formats[16]

    def _check_shapes(self) -> None:
        """Refuse shapes that are not the configuration's; what a reader reads it checks itself."""
        for tensors in self.experts:
            matrices = [self._plain_format.matrices[projection] for projection in tensors.projections]
            rows = sum(matrix.rows for matrix in matrices)
            for part, shape in (("weight", (rows, matrices[0].columns)), ("bias", (rows,))):
                read = self.reader is not None and part in self.reader.parts
                if part in tensors.parts and not read:
                    self._check_shape(tensors.parts[part], shape, stacked=tensors.expert is None)

    def _check_shape(self, place: TensorPlace, matrix: tuple[int, ...], *, stacked: bool) -> None:
        expected = (self.num_experts, *self._stacking.shape(matrix)) if stacked else matrix
        if place.shape != expected:
            turned = stacked and place.shape[1:] == expected[:0:-1]
            raise CheckpointError(
                f"{place.name} in {self.folder} has shape {list(place.shape)} where config.json says "
                f"{list(expected)}{'; transposed experts are not supported yet' if turned else ''}."
            )
