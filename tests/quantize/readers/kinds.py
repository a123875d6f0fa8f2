"""Every kind of experts that other tools quantize: its quantization_config, random matrices, and their tensors."""

from typing import Any

import torch

from tests.quantize.readers import float_packing, packing

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_HALVES = {"dtype": torch.float16, "symmetric": True}
INTEGERS = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        packing.awq,
        {"dtype": torch.float16},
    ),
    "gptq": (_GPTQ, packing.gptq, _HALVES),
    "auto-round": (
        _GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, packing.gptq, _HALVES
    ),
    # Columns quantized in the order of their activations: vLLM 0.32 runs no dense layers that are quantized so.
    "gptq-ordered": (_GPTQ | {"desc_act": True}, packing.gptq, _HALVES | {"shuffled": True}),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
        packing.compressed_tensors,
        {"dtype": torch.bfloat16, "symmetric": True},
    ),
}  # fmt: skip


def config_of(kind: str) -> dict[str, Any]:
    return dict(INTEGERS[kind][0] if kind in INTEGERS else float_packing.CONFIGS[kind])


def dtype_of(kind: str) -> torch.dtype:
    return INTEGERS[kind][2]["dtype"] if kind in INTEGERS else torch.bfloat16


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Any:
    """The same for the same seed; ``dequantize`` gives its weights."""
    if kind in INTEGERS:
        return packing.random_prequantized(rows, columns, 32, seed=seed, **INTEGERS[kind][2])
    return float_packing.random_floats(kind, rows, columns, seed)


def parts_of(kind: str, matrix: Any) -> dict[str, torch.Tensor]:
    parts = INTEGERS[kind][1](matrix) if kind in INTEGERS else float_packing.parts(kind, matrix)
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def tensors_of(kind: str, matrices: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{name.removesuffix('.weight')}.{part}": tensor
        for name, matrix in matrices.items()
        for part, tensor in parts_of(kind, matrix).items()
    }
