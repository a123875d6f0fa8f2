"""Random matrices of published floats, packed into each format's tensors; proven beside golden/ as packing.py is."""

import torch

from vllm_dymoe.quantize.held import Held, blocks
from vllm_dymoe.residency.code import FP8, MXFP4, NVFP4


def compressed(fmt, weights, **changes):
    """A quantization_config of compressed-tensors; activations are quantized, too, as in most checkpoints."""
    weights = {"type": "float", "symmetric": True} | weights
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    if fmt.startswith("nvfp4"):
        activations = {**weights, "dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations} | changes
    config = {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"]}


NVFP4_WEIGHTS = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
FP8_WEIGHTS = {"num_bits": 8, "strategy": "channel"}
CONFIGS = {
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


def random_floats(kind, rows, columns, seed=0):
    """A matrix whose weights have about the size that linear layers have."""
    generator = torch.Generator().manual_seed(seed)
    book = {"mxfp4": MXFP4, "nvfp4": NVFP4}.get(kind.split("-")[0], FP8)
    codes = torch.randint(0, 1 << book.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    if book is FP8:  # of exponents that are about as frequent as those of real weights; no NaN
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


def parts(kind, matrix):
    pairs = matrix.codes[:, 0::2] | matrix.codes[:, 1::2] << 4
    if kind == "mxfp4":
        return {"blocks": pairs.view(len(pairs), -1, 16), "scales": matrix.scales.view(torch.uint8)}
    if kind == "mxfp4-deepseek-v4":
        return {"weight": pairs.view(torch.int8), "scale": matrix.scales}
    if kind == "mxfp4-quark":
        return {"weight": pairs, "weight_scale": matrix.scales.view(torch.uint8)}
    if kind == "mxfp4-compressed-tensors":
        return {"weight_packed": pairs, "weight_scale": matrix.scales.view(torch.uint8)}
    if kind == "nvfp4-modelopt":
        number = torch.tensor(matrix.factor[0])
        return {"weight": pairs, "weight_scale": matrix.scales, "weight_scale_2": number}
    if kind == "nvfp4-compressed-tensors":
        number = torch.tensor([matrix.factor[1]])
        return {"weight_packed": pairs, "weight_scale": matrix.scales, "weight_global_scale": number}
    if kind.startswith("mxfp8"):
        exponents = matrix.scales.to(torch.float8_e8m0fnu).view(torch.uint8)
        return {"weight": matrix.codes.view(torch.float8_e4m3fn), "weight_scale": exponents}
    name = "weight_scale_inv" if kind == "fp8-blocks" else "weight_scale"
    scales = matrix.scales.view(()) if kind == "fp8-modelopt" else matrix.scales
    return {"weight": matrix.codes.view(torch.float8_e4m3fn), name: scales}
