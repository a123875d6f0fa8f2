"""Reading a local Hugging Face checkpoint of a Mixture-of-Experts model, without vLLM.

Experts come in two styles: a tensor for each projection of each expert
(``layers.3.mlp.experts.7.gate_proj.weight``, Mixtral's ``w1``, ``w3``, ``w2``),
or one for all experts of a layer (``experts.gate_up_proj`` [E, 2 I, H] and
``experts.down_proj`` [E, H, I], as transformers 5 names them). Headers say where
every tensor lies, so that whatever cannot work is refused before a byte is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts, Projection
from vllm_dymoe.quantize.tensors import CheckpointError, TensorPlace, read_tensors

_GATE, _UP, _DOWN = (Projection.GATE,), (Projection.UP,), (Projection.DOWN,)
_SEPARATE = {
    "gate_proj.weight": _GATE,
    "up_proj.weight": _UP,
    "down_proj.weight": _DOWN,
    "w1.weight": _GATE,
    "w3.weight": _UP,
    "w2.weight": _DOWN,
}
_FUSED = {"gate_up_proj": (Projection.GATE, Projection.UP), "down_proj": _DOWN}

_EXPERT_NAME = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<layer>\d+)\.(?:[^.]+\.)*experts\.(?P<rest>.+)")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok",)
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of experts, as its name describes it.

    Attributes:
        name: in the checkpoint.
        layer: index of the layer in the model.
        expert: which one; None for a tensor of all the layer's experts.
        projections: what its rows are.
        place: where it lies.
    """

    name: str
    layer: int
    expert: int | None
    projections: tuple[Projection, ...]
    place: TensorPlace


class Checkpoint:
    """One local checkpoint folder.

    Args:
        folder: holds config.json and safetensors files.

    Attributes:
        config: config.json.
        dense: every tensor that is not of an expert, by name.
        experts: the experts' tensors, in the order in which they lie in the files.
        left_out: tensors of layers beyond the model's last (multi-token prediction), which vLLM's model does not load.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_config(folder)
        _refuse_quantized(folder, self.config)
        tensors = read_tensors(folder)
        self.dense: dict[str, TensorPlace] = {}
        self.left_out: dict[str, TensorPlace] = {}
        self.experts: list[ExpertTensor] = []
        stack, beyond = self._stack_of_experts(tensors)
        for name, place in tensors.items():
            layer = re.match(rf"{re.escape(stack)}\.(\d+)\.", name)
            if layer is not None and int(layer[1]) >= beyond:
                self.left_out[name] = place
            elif (expert := self._expert_tensor(name, place)) is not None:
                self.experts.append(expert)
            else:
                self.dense[name] = place
        self.experts.sort(key=lambda tensor: (tensor.place.path, tensor.place.begin))
        self._check_experts()

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in the checkpoint."""
        return sum(tensor.place.nbytes for tensor in self.experts)

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
            dtype = _DTYPES[self.experts[0].place.dtype]
        return torch.bfloat16 if dtype == torch.float32 else dtype

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        return tuple(sorted({tensor.layer for tensor in self.experts}))

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
        formats = {width: ExpertFormat(hidden, intermediate, width, group_size, dtype) for width in bits}
        try:
            for fmt in formats.values():
                _ = fmt.nbytes
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the experts of {self.folder} cannot be packed: {error}.") from error
        return ModelExperts(self.layers, self._size(_NUM_EXPERTS), self._size(_TOP_K), formats)

    def projections(self) -> Iterator[tuple[int, int, Projection, torch.Tensor]]:
        """Every projection of every expert: position of the layer, expert, which, and the weight [rows, columns].

        They come in the order in which they lie on disk, one file open at a time.

        Raises:
            CheckpointError: a file cannot be read.
        """
        positions = {layer: position for position, layer in enumerate(self.layers)}
        opened: Path | None = None
        for tensor in self.experts:
            try:
                if tensor.place.path != opened:
                    file = safe_open(tensor.place.path, framework="pt")
                    opened = tensor.place.path
                if tensor.expert is not None:
                    weight = file.get_tensor(tensor.name)
                    yield positions[tensor.layer], tensor.expert, tensor.projections[0], weight
                    continue
                stacked = file.get_slice(tensor.name)
                for expert in range(tensor.place.shape[0]):
                    parts = stacked[expert].chunk(len(tensor.projections))
                    for projection, weight in zip(tensor.projections, parts, strict=True):
                        yield positions[tensor.layer], expert, projection, weight
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{tensor.place.path} cannot be read ({error}); download it again.") from error

    def fingerprint(self) -> str:
        """Sixteen hex digits of the weights: names, shapes and a sample of each tensor (of each expert in a stack).

        Copying the folder does not change it, training the model further does.
        """
        digest = hashlib.sha256()
        files: dict[Path, int] = {}
        everything = self.dense | {tensor.name: tensor.place for tensor in self.experts}
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
        stacks = {match["stack"] for name in tensors if (match := _EXPERT_NAME.fullmatch(name))}
        if not stacks:
            raise CheckpointError(
                f"{self.folder} holds no tensor of an expert (layers.0.….experts.0.gate_proj.weight or the like); "
                "only Mixture-of-Experts models can be quantized here."
            )
        if len(stacks) > 1:
            raise CheckpointError(f"{self.folder} has experts in several places, {' and '.join(sorted(stacks))}.")
        return stacks.pop(), self._size(("num_hidden_layers",))

    def _expert_tensor(self, name: str, place: TensorPlace) -> ExpertTensor | None:
        match = _EXPERT_NAME.fullmatch(name)
        if match is None:
            return None
        number, _, projection = match["rest"].partition(".")
        layer = int(match["layer"])
        if place.dtype in _DTYPES:
            if number.isdecimal() and projection in _SEPARATE and len(place.shape) == 2:
                return ExpertTensor(name, layer, int(number), _SEPARATE[projection], place)
            if match["rest"] in _FUSED and len(place.shape) == 3:
                return ExpertTensor(name, layer, None, _FUSED[match["rest"]], place)
        raise CheckpointError(
            f"{name} ({place.dtype}, {list(place.shape)}) in {self.folder} belongs to experts but is not the 16-bit "
            "weight of a gate, up or down projection; experts with biases or that are quantized are not supported yet."
        )

    def _check_experts(self) -> None:
        """Refuse shapes that are not the configuration's, and experts that are missing or there twice."""
        fmt = self.model_experts((16,), 64, torch.bfloat16).formats[16]
        count = self._size(_NUM_EXPERTS)
        found: set[tuple[int, int, Projection]] = set()
        for tensor in self.experts:
            rows = sum(fmt.matrices[projection].rows for projection in tensor.projections)
            matrix = (rows, fmt.matrices[tensor.projections[0]].columns)
            expected = matrix if tensor.expert is not None else (count, *matrix)
            if tensor.place.shape != expected:
                turned = tensor.expert is None and tensor.place.shape == (count, *matrix[::-1])
                raise CheckpointError(
                    f"{tensor.name} in {self.folder} has shape {list(tensor.place.shape)} where config.json says "
                    f"{list(expected)}{'; transposed experts are not supported yet' if turned else ''}."
                )
            for expert in range(count) if tensor.expert is None else (tensor.expert,):
                for projection in tensor.projections:
                    if (tensor.layer, expert, projection) in found or expert >= count:
                        why = "is there twice" if expert < count else f"is one too many: config.json says {count}"
                        raise CheckpointError(f"expert {expert} of {tensor.name} in {self.folder} {why}.")
                    found.add((tensor.layer, expert, projection))
        missing = len(self.layers) * count * len(Projection) - len(found)
        if missing:
            raise CheckpointError(f"{self.folder} lacks {missing} projections of experts; download it again.")


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


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    nested = config.get("text_config")
    if not quantization and isinstance(nested, dict):
        quantization = nested.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "a method it does not name")
    if method == "dymoe":
        raise CheckpointError(f"{folder} is a dymoe checkpoint already; quantize the one that it was made from.")
    raise CheckpointError(
        f"{folder} is quantized with {method} already; quantize a checkpoint with 16-bit weights instead."
    )
