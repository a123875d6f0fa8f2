"""Small random checkpoints in other tools' formats, and their weights at 16 bits."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.architectures import Architecture
from tests.quantize.readers.kinds import INTEGERS, config_of, dtype_of, parts_of, random_matrix, tensors_of
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.readers import make_reader


def write(architecture: Architecture, kind: str, folder: Path, *, dense: bool = False) -> dict:
    """Write one model quantized and at 16 bits, as folder/quantized and folder/plain.

    Experts are in the given format; with ``dense``, attention is, too. Returns the experts' matrices by their names in
    folder/plain.
    """
    architecture.save(folder / "plain")
    plain, quantized, experts = {}, {}, {}
    for number, (name, tensor) in enumerate(load_file(folder / "plain" / "model.safetensors").items()):
        is_expert = ".experts." in name and not name.endswith("bias")
        if not is_expert and not (dense and "self_attn" in name and name.endswith("proj.weight")):
            plain[name] = quantized[name] = tensor.to(dtype_of(kind)) if kind in INTEGERS else tensor
            continue
        if tensor.dim() == 2:
            made = {name: random_matrix(kind, *tensor.shape, seed=number)}
            plain[name] = made[name].dequantize().to(dtype_of(kind))
        elif kind == "mxfp4":  # gpt-oss: transposed only when not quantized
            stack = [random_matrix(kind, *one.t().shape, seed=100 * number + e) for e, one in enumerate(tensor)]
            plain[name] = torch.stack([matrix.dequantize().t() for matrix in stack]).bfloat16()
            packed = [parts_of(kind, matrix) for matrix in stack]
            quantized |= {f"{name}_{part}": torch.stack([each[part] for each in packed]) for part in packed[0]}
            experts[name] = stack
            continue
        else:
            made = _separate(name, kind, tensor, 100 * number)
            plain[name] = _transposed_stack(made, len(tensor))
        quantized |= tensors_of(kind, made)
        experts |= made if is_expert else {}
    described = json.loads((folder / "plain" / "config.json").read_text())
    described["dtype"] = str(dtype_of(kind)).removeprefix("torch.")
    config, left = config_of(kind), dense_modules(plain)
    if isinstance(config.get("quantization"), dict):  # ModelOpt's older format
        config["quantization"] = config["quantization"] | {"exclude_modules": left, "kv_cache_quant_algo": None}
    if kind not in INTEGERS or (kind == "int8" and not dense):
        config |= {"modules_to_not_convert": left, "ignore": left, "exclude": left}
    if kind == "auto-round":
        config["extra_config"] = {name: {"bits": 16} for name in left if name.endswith(".gate")}
    save(folder / "plain", described, plain)
    save(folder / "quantized", described | {"quantization_config": config}, quantized)
    return experts


def _separate(stem: str, kind: str, stack: torch.Tensor, seed: int) -> dict:
    """Return random matrices for each projection of a stack.

    The stack is [experts, columns, rows], as in quantized Llama 4 checkpoints.
    """
    place, _, joined = stem.rpartition(".")
    projections = ("gate_proj", "up_proj") if "gate_up" in joined else ("down_proj",)
    experts, columns, rows = stack.shape
    return {
        f"{place}.{expert}.{projection}.weight": random_matrix(
            kind, rows // len(projections), columns, seed + 2 * expert + number
        )
        for expert in range(experts)
        for number, projection in enumerate(projections)
    }


def _transposed_stack(separate: dict, experts: int) -> torch.Tensor:
    weights = [matrix.dequantize() for matrix in separate.values()]
    each = len(weights) // experts
    return torch.stack([torch.cat(weights[e * each : (e + 1) * each]).t() for e in range(experts)]).bfloat16()


def dequantize_checkpoint(source: Path, folder: Path) -> dict:
    """Write folder/plain with the dequantized weights of another tool's checkpoint.

    They are dequantized as its reader does it. Returns the experts' matrices by their names in folder/plain.
    """
    described = json.loads((source / "config.json").read_text())
    reader = make_reader(described.pop("quantization_config"))
    tensors = load_file(source / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    experts = {}
    for name in (name for name in tensors if ".experts." in name and name.endswith(f".{reader.parts[0]}")):
        stem = name.rpartition(".")[0]
        parts = {part: tensors[f"{stem}.{part}"] for part in reader.parts}
        rows, columns = tensors[name].shape
        matrix = reader.read(parts, rows, columns * (2 if reader.bits == 4 else 1))
        plain[f"{stem}.weight"] = matrix.dequantize().bfloat16()
        experts[f"{stem}.weight"] = matrix
    save(folder / "plain", described, plain)
    return experts


def dense_modules(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and ".experts." not in name]


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


_NAMES = {"w1": 0, "w3": 1, "w2": 2, "gate_proj": 0, "up_proj": 1, "down_proj": 2}


def _named(experts: dict) -> Iterator[tuple[int, int, int, Any]]:
    for name, matrix in experts.items():
        if not isinstance(matrix, list):
            found = re.search(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.", name)
            yield int(found[1]), int(found[2]), _NAMES[found[3]], matrix
            continue
        layer = int(name.split(".layers.")[1].split(".")[0])
        for expert, each in enumerate(matrix):
            if "down" in name:
                yield layer, expert, Projection.DOWN, each
            else:
                yield layer, expert, Projection.GATE, each.part(0, slice(0, None, 2))
                yield layer, expert, Projection.UP, each.part(0, slice(1, None, 2))


def check_store(store: Any, experts: dict) -> None:
    """Check that every code and every weight of the high version is the checkpoint's."""
    bits, count = max(store.experts.formats), 0

    def read(key: SliceKey, format: Any, base: Any = None) -> Any:
        packed = torch.empty(format.nbytes, dtype=torch.uint8)
        store.read_into(key, packed)
        return format.view(packed, base)

    for layer, expert, projection, matrix in _named(experts):
        key = SliceKey(store.experts.layers.index(layer), expert, bits)
        fmt = store.experts.format(key)
        base = read(replace(key, bits=bits // 2), fmt.base) if fmt.nested else None
        packed = read(key, fmt, base)[projection]
        if isinstance(matrix, torch.Tensor) or not packed.format.quantized:
            # A layer left at 16 bits, or a gate in another format than up.
            plain = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantize()
            assert torch.equal(packed.weight, plain), (layer, expert, projection)
            count += 1
            continue
        assert torch.equal(unpack(packed), matrix.codes), (layer, expert, projection)
        want = matrix.dequantize()
        assert torch.equal(dequantize(packed, want.dtype), want), (layer, expert, projection)
        count += 1
    assert count == len(Projection) * len(store.experts.layers) * store.experts.num_experts
