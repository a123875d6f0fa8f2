"""Kinds of experts that other tools quantize: configurations, matrices, tensors.

Plain loops pack them after each format's description. Readers and packers are verified against tensors that the
formats' own tools packed (golden/); then the packers create whole checkpoints.
"""

from typing import Any

import torch

from vllm_dymoe.experts.encoding import FP8, MXFP4, NVFP4
from vllm_dymoe.quantize.held import Held, blocks, integers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def random_integers(
    rows, columns, group_size, *, bits=4, symmetric=False, dtype=torch.float16, seed=0, shuffled=False
) -> Held:
    """Return random integers whose weights are as large as a linear layer's.

    ``shuffled`` scatters the columns of each group.
    """
    generator = torch.Generator().manual_seed(seed)
    group_size = group_size or columns
    groups = -(-columns // group_size)
    middle = 1 << bits - 1
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    zero_points = torch.randint(0, 1 << bits, (rows, groups), generator=generator, dtype=torch.uint8)
    if symmetric:
        zero_points.fill_(middle)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) * 2 * columns**-0.5 / middle
    column_groups = blocks(columns, group_size)
    if shuffled:
        column_groups = column_groups[torch.randperm(columns, generator=generator)]
    return integers(bits, codes, scales.to(dtype), zero_points, column_groups)


def words(numbers, bits):
    """Pack numbers below 2**bits into int32, the first in the lowest bits.

    [n, m] numbers become [n, m * bits / 32].
    """
    each = 32 // bits
    numbers = numbers.long()
    assert numbers.shape[1] % each == 0
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        packed |= numbers[:, place::each] << bits * place
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def awq(matrix):
    def in_order(numbers):
        return numbers.reshape(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(numbers.shape)

    return {
        "qweight": words(in_order(matrix.codes.t()), 4),
        "qzeros": words(in_order(matrix.zero_points.t()), 4),
        "scales": matrix.scales.t().contiguous(),
    }


def gptq(matrix, *, version="gptq"):
    """Pack like AutoGPTQ, whose first version stores zero points minus one."""
    stored = (matrix.zero_points.int() - int(version == "gptq")) & 2**matrix.bits - 1
    return {
        "qweight": words(matrix.codes, matrix.bits).t().contiguous(),
        "qzeros": words(stored.t(), matrix.bits),
        "scales": matrix.scales.t().contiguous(),
        "g_idx": matrix.column_groups.int(),
    }


def compressed_tensors(matrix, *, symmetric=True):
    """Pack like compressed-tensors' pack-quantized, which pads the last word."""

    def filled(numbers):
        return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // matrix.bits)))

    parts = {
        "weight_packed": words(filled(matrix.codes), matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(filled(matrix.zero_points.t()), matrix.bits).t().contiguous()
    return parts


def int_quantized(matrix, *, symmetric=True):
    """Pack signed bytes like compressed-tensors' int-quantized."""
    parts = {"weight": (matrix.codes.short() - 128).to(torch.int8), "weight_scale": matrix.scales}
    if not symmetric:
        parts["weight_zero_point"] = (matrix.zero_points.short() - 128).to(torch.int8)
    return parts


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_HALVES = {"dtype": torch.float16, "symmetric": True}
INTEGERS = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
        {"dtype": torch.float16},
    ),
    "gptq": (_GPTQ, gptq, _HALVES),
    "auto-round": (_GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, gptq, _HALVES),
    # Columns quantized in the order of their activations; vLLM 0.32 cannot run dense layers in this format.
    "gptq-ordered": (_GPTQ | {"desc_act": True}, gptq, _HALVES | {"shuffled": True}),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
        },
        compressed_tensors,
        {"dtype": torch.bfloat16, "symmetric": True},
    ),
    # W8A8; only the weights are read.
    "int8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _WEIGHTS | {"num_bits": 8},
                    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
                }
            },
        },
        int_quantized,
        {"dtype": torch.bfloat16, "symmetric": True, "bits": 8},
    ),
}


def compressed(fmt, weights, **changes):
    """Return a quantization_config of compressed-tensors.

    Activations are quantized as well, as in most checkpoints.
    """
    weights = {"type": "float", "symmetric": True} | weights
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    if fmt.startswith("nvfp4"):
        activations = {**weights, "dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations} | changes
    config = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"]}


NVFP4_WEIGHTS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
FP8_WEIGHTS = {"num_bits": 8, "strategy": "channel"}
FLOATS = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "mxfp4-compressed-tensors": compressed(
        "mxfp4-pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}
    ),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "nvfp4-compressed-tensors": compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS),
    "mxfp4-deepseek-v4": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "expert_dtype": "fp4",
    },
    "mxfp4-quark": {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            "input_tensors": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    },
    "mxfp8-modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    "mxfp8-compressed-tensors": compressed(
        "mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    ),
    "fp8-blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "fp8-modelopt": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
    "fp8-compressed-tensors": compressed("float-quantized", FP8_WEIGHTS),
}
_FLOAT_PARTS = {
    "mxfp4": ("blocks", "scales"),
    "mxfp4-deepseek-v4": ("weight", "scale"),
    "mxfp4-compressed-tensors": ("weight_packed", "weight_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "nvfp4-compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "fp8-blocks": ("weight", "weight_scale_inv"),
}


def random_floats(kind, rows, columns, seed=0):
    """Return a random matrix whose weights are as large as a linear layer's."""
    generator = torch.Generator().manual_seed(seed)
    book = {"mxfp4": MXFP4, "nvfp4": NVFP4}.get(kind.split("-")[0], FP8)
    codes = torch.randint(0, 1 << book.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    if book is FP8:  # with exponents as frequent as in real weights, and without NaN
        codes = (torch.randn(rows, columns, generator=generator) * 100).to(torch.float8_e4m3fn).view(torch.uint8)
    row_block = {"fp8-blocks": 128, "fp8-modelopt": rows}.get(kind, 1)
    own = {"fp8": 128 if kind == "fp8-blocks" else columns, "mxfp8": 32}
    column_block = own.get(kind.split("-")[0], book.group_size)
    shape = -(-rows // row_block), -(-columns // column_block)
    size = columns**-0.5 * (torch.rand(shape, generator=generator) + 0.5)
    factor = (1.0, 1.0)
    if book is NVFP4:
        factor = (0.5**9 * 1.1, 1.0) if kind.endswith("modelopt") else (1.0, 2.0**9 * 1.1)
        scales = (size * 100).to(book.scale_dtype)
    elif kind.startswith("mxfp8"):
        scales = (size / 100).to(torch.float8_e8m0fnu).float()
    else:
        scales = (size / (100 if book is FP8 else 2)).to(book.scale_dtype)
    return Held(book, codes, scales, blocks(rows, row_block), blocks(columns, column_block), factor)


def float_parts(kind: str, matrix: Held) -> dict[str, torch.Tensor]:
    codes, scales, numbers = matrix.codes.view(torch.float8_e4m3fn), matrix.scales, []
    if matrix.bits == 4:
        codes = matrix.codes[:, 0::2] | matrix.codes[:, 1::2] << 4
    if kind == "mxfp4":
        codes = codes.view(len(codes), -1, 16)
    if kind == "mxfp4-deepseek-v4":
        codes = codes.view(torch.int8)
    elif kind.startswith("mx"):
        scales = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    if kind == "fp8-modelopt":
        scales = scales.view(())
    if kind.startswith("nvfp4"):
        numbers = [torch.tensor(matrix.factor[0]) if kind.endswith("modelopt") else torch.tensor([matrix.factor[1]])]
    return dict(zip(_FLOAT_PARTS.get(kind, ("weight", "weight_scale")), (codes, scales, *numbers), strict=True))


def config_of(kind: str) -> dict[str, Any]:
    return dict(INTEGERS[kind][0] if kind in INTEGERS else FLOATS[kind])


def dtype_of(kind: str) -> torch.dtype:
    return INTEGERS[kind][2]["dtype"] if kind in INTEGERS else torch.bfloat16


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Held:
    """Return a random matrix, always the same one for a seed."""
    if kind in INTEGERS:
        return random_integers(rows, columns, 32, seed=seed, **INTEGERS[kind][2])
    return random_floats(kind, rows, columns, seed)


def parts_of(kind: str, matrix: Held) -> dict[str, torch.Tensor]:
    parts = INTEGERS[kind][1](matrix) if kind in INTEGERS else float_parts(kind, matrix)
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def tensors_of(kind: str, matrices: dict[str, Held]) -> dict[str, torch.Tensor]:
    return {
        f"{name.removesuffix('.weight')}.{part}": tensor
        for name, matrix in matrices.items()
        for part, tensor in parts_of(kind, matrix).items()
    }
