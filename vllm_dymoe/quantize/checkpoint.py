"""Reading a local Hugging Face checkpoint of a Mixture-of-Experts model, 16-bit or quantized, without vLLM.

Headers say where every tensor lies, so that whatever cannot work is refused before a byte is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import known_parts, make_reader
from vllm_dymoe.quantize.readers.compatibility import format_fields
from vllm_dymoe.quantize.tensor_names import ExpertName, Stacking, read_name
from vllm_dymoe.quantize.tensors import CheckpointError, TensorPlace, read_tensors

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k")
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of experts.

    Attributes:
        name: in the checkpoint.
        layer: index of the layer in the model.
        expert: which one; None for a stack of all the layer's experts.
        projections: what its rows are.
        place: where it lies.
        parts: in a quantized checkpoint the tensors that belong together, by the ends of their names: name and place of
            each. The first of them, the codes, is also this tensor.
    """

    name: str
    layer: int
    expert: int | None
    projections: tuple[Projection, ...]
    place: TensorPlace
    parts: Mapping[str, tuple[str, TensorPlace]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(place.nbytes for _, place in self.parts.values()) or self.place.nbytes

    @property
    def matrix(self) -> tuple[int, int | None, tuple[Projection, ...]]:
        """What a weight and its bias have in common."""
        return self.layer, self.expert, self.projections


class Checkpoint:
    """One local checkpoint folder.

    Args:
        folder: holds config.json and safetensors files.

    Attributes:
        config: config.json.
        dense: every tensor that is not of an expert, by name.
        experts: the experts' weights, in the order in which they lie in the files.
        biases: the experts' biases.
        reader: of experts that another tool has quantized; None if they have 16 bits.
        left_out: tensors of layers beyond the model's last (multi-token prediction), which vLLM's model does not load.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self.quantization = _quantization(folder, self.config)
        self.reader = None if self.quantization is None else make_reader(self.quantization)
        tensors = read_tensors(folder)
        self.dense: dict[str, TensorPlace] = {}
        self.left_out: dict[str, TensorPlace] = {}
        self.experts: list[ExpertTensor] = []
        self.biases: list[ExpertTensor] = []
        self._stacking = Stacking.of(self._text_config.get("model_type"))
        stack, beyond = self._stack_of_experts(tensors)
        prequantized: dict[tuple[int, int | None, tuple[Projection, ...]], dict[str, tuple[str, TensorPlace]]] = {}
        for name, place in tensors.items():
            layer = re.match(rf"{re.escape(stack)}\.(\d+)\.", name)
            if layer is not None and int(layer[1]) >= beyond:
                self.left_out[name] = place
            elif (described := read_name(name)) is None:
                self.dense[name] = place
            elif self.reader is not None and described.projections and described.part in known_parts(self.reader):
                matrix = described.layer, described.expert, described.projections
                prequantized.setdefault(matrix, {})[described.part] = name, place
            else:
                tensors_of_kind = self.biases if described.bias else self.experts
                tensors_of_kind.append(self._expert_tensor(name, described, place))
        self.experts += [self._prequantized_tensor(*matrix, parts) for matrix, parts in prequantized.items()]
        self.experts.sort(key=lambda tensor: (tensor.place.path, tensor.place.begin))
        self._check_experts()

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in the checkpoint."""
        return sum(tensor.nbytes for tensor in (*self.experts, *self.biases))

    def layer_bytes(self, position: int) -> int:
        """Bytes of the experts of one layer in the checkpoint."""
        layer = self.layers[position]
        return sum(tensor.place.nbytes for tensor in (*self.experts, *self.biases) if tensor.layer == layer)

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything else."""
        return sum(place.nbytes for place in self.dense.values())

    @cached_property
    def dtype(self) -> torch.dtype:
        """What ``--dtype auto`` means: the checkpoint's own dtype, and bfloat16 for one of 32 bits, as in vLLM."""
        named = self._text_config.get("dtype") or self._text_config.get("torch_dtype")
        named = named or self.config.get("dtype") or self.config.get("torch_dtype")
        dtype = getattr(torch, str(named).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            first = self.experts[0]
            stored = {first.place.dtype, *(place.dtype for _, place in first.parts.values())}
            dtype = next((_DTYPES[name] for name in sorted(stored) if name in _DTYPES), torch.bfloat16)
        return torch.bfloat16 if dtype == torch.float32 else dtype

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        return tuple(sorted({tensor.layer for tensor in self.experts}))

    @property
    def num_experts(self) -> int:
        """Experts in each layer."""
        return self._size(_NUM_EXPERTS)

    def model_experts(self, bits: tuple[int, ...], group_size: int, dtype: torch.dtype) -> ModelExperts:
        """What a store of this checkpoint holds.

        Args:
            bits: stored bit-widths, the high tier first.
            group_size: weights that share one scale and zero.
            dtype: of the scales, and of the weights at 16 bits.

        Raises:
            CheckpointError: config.json lacks a size, or the format cannot hold this model.
        """
        hidden, intermediate = self._size(("hidden_size",)), self._size(_INTERMEDIATE)
        biased = bool(self.biases)
        formats = {
            width: ExpertFormat(
                hidden, intermediate, width, group_size, dtype, biased,
                **{field: width in widths for field, widths in format_fields(self.reader, {}).items()},
            )
            for width in bits
        }  # fmt: skip
        try:
            for fmt in formats.values():
                _ = fmt.nbytes
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the experts of {self.folder} cannot be packed: {error}.") from error
        return ModelExperts(self.layers, self.num_experts, self._size(_TOP_K), formats)

    def projections(
        self,
    ) -> Iterator[tuple[int, int, Projection, torch.Tensor | PrequantizedMatrix, torch.Tensor | None]]:
        """Every projection of every expert: layer's position, expert, which, weight [rows, columns] and bias [rows].

        They come in the order in which they lie on disk, one file open at a time.

        Raises:
            CheckpointError: a file cannot be read.
        """
        positions = {layer: position for position, layer in enumerate(self.layers)}
        biases = {tensor.matrix: tensor for tensor in self.biases}
        opened: Path | None = None
        for tensor in self.experts:
            try:
                if tensor.place.path != opened:
                    file = safe_open(tensor.place.path, framework="pt")
                    opened = tensor.place.path
                bias = _read(biases[tensor.matrix].name, biases[tensor.matrix].place) if biases else None
                if tensor.parts and tensor.expert is not None:
                    yield (
                        positions[tensor.layer],
                        tensor.expert,
                        tensor.projections[0],
                        self._read_prequantized(tensor),
                        bias,
                    )
                    continue
                if tensor.expert is not None:
                    weight = file.get_tensor(tensor.name)
                    yield positions[tensor.layer], tensor.expert, tensor.projections[0], weight, bias
                    continue
                stacked = file.get_slice(tensor.name)
                for expert in range(tensor.place.shape[0]):
                    weights = self._stacking.split(stacked[expert], tensor.projections)
                    parts = (
                        [None] * len(weights)
                        if bias is None
                        else self._stacking.split(bias[expert], tensor.projections)
                    )
                    for projection, weight, part in zip(tensor.projections, weights, parts, strict=True):
                        yield positions[tensor.layer], expert, projection, weight, part
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{tensor.place.path} cannot be read ({error}); download it again.") from error

    def expert(self, position: int, expert: int) -> dict[Projection, tuple[torch.Tensor, torch.Tensor | None]]:
        """One expert: by projection, its weight [rows, columns] and its bias [rows], if it has one.

        Args:
            position: of the layer.
            expert: which one.

        Raises:
            CheckpointError: a file cannot be read.
        """
        matrices = {}
        for projection in Projection:
            place = self.layers[position], expert, projection
            bias = self._part(self._biases[place], expert, projection) if self._biases else None
            matrices[projection] = self._part(self._weights[place], expert, projection), bias
        return matrices

    @cached_property
    def _weights(self) -> dict[tuple[int, int, Projection], ExpertTensor]:
        return self._by_place(self.experts)

    @cached_property
    def _biases(self) -> dict[tuple[int, int, Projection], ExpertTensor]:
        return self._by_place(self.biases)

    def _by_place(self, tensors: list[ExpertTensor]) -> dict[tuple[int, int, Projection], ExpertTensor]:
        """By index of the layer, expert and projection."""
        return {
            (tensor.layer, expert, projection): tensor
            for tensor in tensors
            for expert in (range(tensor.place.shape[0]) if tensor.expert is None else (tensor.expert,))
            for projection in tensor.projections
        }

    def _part(self, tensor: ExpertTensor, expert: int, projection: Projection) -> torch.Tensor:
        """What a tensor holds of one projection of an expert."""
        try:
            with safe_open(tensor.place.path, framework="pt") as file:
                if tensor.expert is not None:
                    found: torch.Tensor = file.get_tensor(tensor.name)
                    return found
                stacked = file.get_slice(tensor.name)[expert]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{tensor.place.path} cannot be read ({error}); download it again.") from error
        return self._stacking.split(stacked, tensor.projections)[tensor.projections.index(projection)]

    def fingerprint(self) -> str:
        """Sixteen hex digits of the weights: names, shapes and a sample of each tensor (of each expert in a stack).

        Copying the folder does not change it, training the model further does.
        """
        digest = hashlib.sha256()
        files: dict[Path, int] = {}
        everything = self.dense | {tensor.name: tensor.place for tensor in (*self.experts, *self.biases)}
        everything |= dict(part for tensor in self.experts for part in tensor.parts.values())
        try:
            for name, place in sorted(everything.items()):
                if place.path not in files:
                    files[place.path] = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                digest.update(f"{name} {place.dtype} {place.shape}".encode())
                parts = place.shape[0] if len(place.shape) == 3 else 1
                size = place.nbytes // max(1, parts)
                for part in range(parts):
                    middle = place.begin + part * size + max(0, size - _SAMPLE_BYTES) // 2
                    digest.update(os.pread(files[place.path], min(size, _SAMPLE_BYTES), middle))
        finally:
            for file in files.values():
                os.close(file)
        return digest.hexdigest()[:16]

    @property
    def _text_config(self) -> Mapping[str, Any]:
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    def _size(self, keys: tuple[str, ...]) -> int:
        for key in keys:
            value = self._text_config.get(key)
            if value is not None:
                if not isinstance(value, int) or value < 1:
                    raise CheckpointError(f"{key} in {self.folder / 'config.json'} is {value!r}, not a size.")
                return value
        raise CheckpointError(f"{self.folder / 'config.json'} has no {' or '.join(keys)}.")

    def _stack_of_experts(self, tensors: Mapping[str, TensorPlace]) -> tuple[str, int]:
        """Name of the one stack of layers with experts, and the index after the model's last layer."""
        stacks = {described.layers for name in tensors if (described := read_name(name))}
        if not stacks:
            raise CheckpointError(
                f"{self.folder} holds no tensor of an expert (layers.0.….experts.0.gate_proj.weight or the like); "
                "only Mixture-of-Experts models can be quantized here."
            )
        if len(stacks) > 1:
            raise CheckpointError(f"{self.folder} has experts in several places, {' and '.join(sorted(stacks))}.")
        return stacks.pop(), self._size(("num_hidden_layers",))

    def _expert_tensor(self, name: str, described: ExpertName, place: TensorPlace) -> ExpertTensor:
        dimensions = (2 if described.expert is not None else 3) - described.bias
        method = self.reader.method if self.reader is not None else None
        known = described.projections and described.part in ("weight", "bias")
        if place.dtype not in _DTYPES or not known or len(place.shape) != dimensions:
            raise CheckpointError(
                f"{name} ({place.dtype}, {list(place.shape)}) in {self.folder} belongs to experts but is not the "
                f"16-bit weight or bias of a gate, up or down projection{f' or its {method} codes' if method else ''}; "
                "other quantized experts are not supported yet."
            )
        if method is not None and not described.bias:
            raise CheckpointError(
                f"{name} in {self.folder} has 16 bits, although config.json says that the checkpoint is quantized with "
                f"{method}; a mix of both among the experts is not supported yet."
            )
        return ExpertTensor(name, described.layer, described.expert, described.projections, place)

    def _prequantized_tensor(
        self,
        layer: int,
        expert: int | None,
        projections: tuple[Projection, ...],
        parts: Mapping[str, tuple[str, TensorPlace]],
    ) -> ExpertTensor:
        """The tensors of one quantized projection."""
        assert self.reader is not None
        missing = [part for part in self.reader.parts if part not in parts]
        if missing:
            there, _ = next(iter(parts.values()))
            stem = there.rpartition(".")[0]
            raise CheckpointError(
                f"{self.folder} has {there} but lacks {stem}.{missing[0]}; download the checkpoint again."
            )
        name, place = parts[self.reader.parts[0]]
        return ExpertTensor(name, layer, expert, projections, place, parts)

    def _read_prequantized(self, tensor: ExpertTensor) -> PrequantizedMatrix:
        """Read one quantized projection.

        Raises:
            CheckpointError: a tensor is not what config.json says.
        """
        assert self.reader is not None
        matrix = self.model_experts((16,), 64, torch.bfloat16).formats[16].matrices[tensor.projections[0]]
        tensors = {part: _read(*place) for part, place in tensor.parts.items()}
        try:
            for part in self.reader.checked:
                if part in tensors:
                    self.reader.check(part, tensors[part], matrix.rows, matrix.columns)
            return self.reader.read(tensors, matrix.rows, matrix.columns)
        except ValueError as error:
            stem = tensor.name.rpartition(".")[0]
            raise CheckpointError(f"{stem} in {self.folder} is no {self.reader.method} matrix: {error}") from error

    def _check_experts(self) -> None:
        """Refuse shapes that are not the configuration's, and experts that are missing or there twice."""
        fmt = self.model_experts((16,), 64, torch.bfloat16).formats[16]
        count = self.num_experts
        found: set[tuple[int, int, Projection]] = set()
        for tensor in self.experts:
            rows = sum(fmt.matrices[projection].rows for projection in tensor.projections)
            if not tensor.parts:  # the reader knows what their shapes are
                self._check_shape(tensor, (rows, fmt.matrices[tensor.projections[0]].columns), count)
            for expert in range(count) if tensor.expert is None else (tensor.expert,):
                for projection in tensor.projections:
                    if (tensor.layer, expert, projection) in found or expert >= count:
                        why = "is there twice" if expert < count else f"is one too many: config.json says {count}"
                        raise CheckpointError(f"expert {expert} of {tensor.name} in {self.folder} {why}.")
                    found.add((tensor.layer, expert, projection))
        missing = sorted({(layer, e, p) for layer in self.layers for e in range(count) for p in Projection} - found)
        if missing:
            layer, expert, projection = missing[0]
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} projections of experts, the first being the "
                f"{projection.name.lower()} projection of expert {expert} in layer {layer}; download it again."
            )
        for tensor in self.biases:
            rows = sum(fmt.matrices[projection].rows for projection in tensor.projections)
            self._check_shape(tensor, (rows,), count)
        alone = {tensor.matrix for tensor in self.experts} ^ {tensor.matrix for tensor in self.biases}
        if self.biases and alone:
            raise CheckpointError(
                f"{self.folder} has biases for some projections of its experts and not for {len(alone)} others; "
                "only models in which all of them or none have one can be quantized here."
            )

    def _check_shape(self, tensor: ExpertTensor, matrix: tuple[int, ...], count: int) -> None:
        expected = matrix if tensor.expert is not None else (count, *self._stacking.shape(matrix))
        if tensor.place.shape != expected:
            turned = tensor.expert is None and tensor.place.shape[1:] == expected[:0:-1]
            raise CheckpointError(
                f"{tensor.name} in {self.folder} has shape {list(tensor.place.shape)} where config.json says "
                f"{list(expected)}{'; transposed experts are not supported yet' if turned else ''}."
            )


def _read(name: str, place: TensorPlace) -> torch.Tensor:
    with safe_open(place.path, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: there is none, or it is not a JSON object.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; download the model first, with `hf download {folder} --local-dir FOLDER`."
            if not folder.exists()
            else f"{folder} is not a folder."
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a JSON object.")
    return config


def _quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How config.json says that the checkpoint is quantized; None if it has 16 bits.

    Raises:
        CheckpointError: it is ours already.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    nested = config.get("text_config")
    if not quantization and isinstance(nested, dict):
        quantization = nested.get("quantization_config")
    if not quantization:
        return None
    if quantization.get("quant_method") == "dymoe":
        raise CheckpointError(f"{folder} is a dymoe checkpoint already; quantize the one that it was made from.")
    return dict(quantization)
