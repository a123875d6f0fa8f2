"""Writes golden/*.safetensors with the formats' own packing code; kept so that anyone can repeat it.

    pip install torch transformers compressed-tensors==0.17.0
    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
    pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-0.7.1-*.whl -d auto-gptq
    pip install --target modelopt --no-deps nvidia-modelopt==0.47.0 scipy omegaconf pulp antlr4-python3-runtime==4.9.3
    PYTHONPATH=.:autoawq-0.2.9:auto-gptq:modelopt python tests/quantize/readers/make_golden.py

Each file has the tensors as the tool packed them, ``codes`` and ``zero_points`` that it was given (where it was given
any), and ``weights``: what the tool's own code makes of the packed tensors again.
"""

import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden"


def without_init(*packages):
    """Make modules importable without their packages' own __init__, which import whole frameworks."""
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = module


def random_matrix(rows, columns, group, *, lowest=0, dtype=torch.float16):
    """Codes, zero points and scales at 4 bits, and a linear layer with the weights that they stand for."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    zeros = torch.randint(lowest, 16, (rows, columns // group), generator=generator)
    scales = ((torch.rand(rows, columns // group, generator=generator) + 0.5) * 0.02).to(dtype)
    return codes, zeros, scales


def linear_of(weights):
    """A layer with these weights."""
    linear = torch.nn.Linear(*weights.shape[::-1], bias=False, dtype=weights.dtype)
    linear.weight.data = weights
    return linear


def awq():
    """WQLinear_GEMM.from_linear packs, dequantize_gemm unpacks."""
    without_init("awq", "awq.modules", "awq.modules.linear")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    codes, zeros, scales = random_matrix(64, 192, 64)
    steps = codes - zeros.repeat_interleave(64, 1)
    linear = linear_of((steps * scales.float().repeat_interleave(64, 1)).half())
    packed = WQLinear_GEMM.from_linear(linear, 4, 64, scales=scales.t().contiguous(), zeros=zeros.t().float())
    parts = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    return parts | {
        "codes": codes.to(torch.uint8),
        "zero_points": zeros.to(torch.uint8),
        "weights": dequantize_gemm(*parts.values(), 4, 64).t(),
    }


def gptq():
    """QuantLinear.pack packs columns in another order than that of their groups, its forward of ones unpacks."""
    without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    # A zero point of 0 cannot be packed: less one it is negative, and overwrites its neighbours.
    codes, zeros, scales = random_matrix(64, 192, 64, lowest=1)
    g_idx = (torch.arange(192) // 64)[torch.randperm(192, generator=torch.Generator().manual_seed(2))].int()
    steps = codes - zeros[:, g_idx.long()]
    linear = linear_of((steps * scales.float()[:, g_idx.long()]).half())
    packed = QuantLinear(4, 64, 192, 64, bias=False)
    packed.pack(linear, scales, zeros.half(), g_idx)
    return {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales", "g_idx")} | {
        "codes": codes.to(torch.uint8),
        "zero_points": zeros.to(torch.uint8),
        "weights": packed(torch.eye(192, dtype=torch.float16)).t(),
    }


def compressed_tensors(bits, group, symmetric):
    """PackedQuantizationCompressor compresses and decompresses."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rows, columns = 44, 192
    generator = torch.Generator().manual_seed(3)
    middle = 2 ** (bits - 1)
    groups = columns // (group or columns)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator)
    if symmetric:
        zeros.fill_(middle)
    scales = ((torch.rand(rows, groups, generator=generator) + 0.5) * 0.16 / middle).bfloat16()
    width = columns // groups
    weights = (codes - zeros.repeat_interleave(width, 1)) * scales.float().repeat_interleave(width, 1)
    strategy = "group" if group else "channel"
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": weights, "weight_scale": scales, "weight_zero_point": (zeros - middle).to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    unpacked = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    return {part: tensor for part, tensor in packed.items() if part.startswith("weight_")} | {
        "codes": codes.to(torch.uint8),
        "zero_points": zeros.to(torch.uint8),
        "weights": unpacked,
    }


def random_weights(rows=44, columns=192):
    """Weights with groups of very different sizes, some of them zero, bfloat16."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randn(rows, columns // 16, generator=generator).mul(2).exp2()
    sizes[::9, ::5] = 0
    weights = torch.randn(rows, columns, generator=generator) * 0.02 * sizes.repeat_interleave(16, 1)
    return weights.bfloat16()


def mxfp4():
    """ModelOpt's MXFP4QTensor packs, transformers' convert_moe_packed_tensors unpacks gpt-oss's spelling."""
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = random_weights()
    packed, scales = MXFP4QTensor.quantize(weights, 32)
    blocks, scales = packed._quantized_data.view(44, 6, 16), scales.view(44, 6)
    unpacked = convert_moe_packed_tensors(blocks[None], scales[None])[0].t()  # gpt-oss multiplies with its transpose
    again = packed.dequantize(torch.bfloat16, scale=scales.view(-1, 1), block_sizes={-1: 32})
    assert torch.equal(unpacked, again)
    return {"blocks": blocks, "scales": scales, "weights": unpacked}


def nvfp4_of_modelopt():
    """NVFP4QTensor quantizes and dequantizes."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scales, scale_2 = NVFP4QTensor.quantize(random_weights(), 16)
    unpacked = packed.dequantize(torch.float32, scale=scales, double_scale=scale_2, block_sizes={-1: 16})
    return {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": scale_2, "weights": unpacked}


def fp8_of_modelopt():
    """FP8QTensor quantizes and dequantizes; one scale for the whole matrix."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

    packed, scale = FP8QTensor.quantize(random_weights().float())
    unpacked = packed.dequantize(torch.float32, scale=scale)
    return {"weight": packed._quantized_data, "weight_scale": scale, "weights": unpacked}


def mxfp8():
    """ModelOpt's MXFP8QTensor quantizes and dequantizes."""
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    packed, scales = MXFP8QTensor.quantize(random_weights())
    unpacked = packed.dequantize(torch.float32, scale=scales)
    return {"weight": packed._quantized_data, "weight_scale": scales, "weights": unpacked}


def mxfp4_of_deepseek():
    """The numbers of mxfp4, in DeepSeek-V4's spelling."""
    made = mxfp4()
    scales = made["scales"].view(torch.float8_e8m0fnu)
    return {"weight": made["blocks"].view(44, -1).view(torch.int8), "scale": scales, "weights": made["weights"]}


def fp8_blocks():
    """transformers' Fp8Quantize quantizes in blocks of 128 x 128, its Fp8Dequantize turns them back."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    packed = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("weight", random_weights(128, 256))
    unpacked = Fp8Dequantize(None)._dequantize_one(packed["weight"], packed["weight_scale_inv"], torch.float32)
    return packed | {"weights": unpacked}


def compressed_floats(name, **arguments):
    """The compressor of a format compresses and decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = random_weights()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", symmetric=True, **arguments))
    state = {"weight": weights}
    width = arguments.get("group_size") or weights.shape[1]
    largest = weights.float().view(44, -1, width).abs().amax(2)
    if name == "nvfp4-pack-quantized":
        state["weight_global_scale"] = (6 * 448 / largest.max()).view(1)
        scales = (largest / 6 * state["weight_global_scale"]).clamp(2**-9).to(torch.float8_e4m3fn).bfloat16()
    elif name in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        highest = 6 if name == "mxfp4-pack-quantized" else 448
        scales = torch.exp2(torch.ceil(torch.log2((largest / highest).clamp(2**-100)))).bfloat16()
    else:
        scales = (largest / 448).clamp(2**-20)
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress(state | {"weight_scale": scales}, scheme)
    unpacked = compressor.decompress(packed, scheme)["weight"]
    return {part: tensor for part, tensor in packed.items() if part.startswith("weight")} | {"weights": unpacked}


MAKERS = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors-4-group": lambda: compressed_tensors(4, 64, True),
    "compressed-tensors-8-channel": lambda: compressed_tensors(8, None, True),
    "compressed-tensors-4-asymmetric": lambda: compressed_tensors(4, 64, False),
    "mxfp4": mxfp4,
    "mxfp4-deepseek-v4": mxfp4_of_deepseek,
    "mxfp8-modelopt": mxfp8,
    "mxfp8-compressed-tensors": lambda: compressed_floats(
        "mxfp8-quantized", num_bits=8, strategy="group", group_size=32
    ),
    "nvfp4-modelopt": nvfp4_of_modelopt,
    "fp8-modelopt": fp8_of_modelopt,
    "fp8-blocks": fp8_blocks,
    "nvfp4-compressed-tensors": lambda: compressed_floats(
        "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16
    ),
    "mxfp4-compressed-tensors": lambda: compressed_floats(
        "mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32
    ),
    "fp8-compressed-tensors": lambda: compressed_floats("float-quantized", num_bits=8, strategy="channel"),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        tensors = {key: tensor.detach().contiguous() for key, tensor in MAKERS[name]().items()}
        save_file(tensors, GOLDEN / f"{name}.safetensors")
        print(name, {key: (tensor.dtype, list(tensor.shape)) for key, tensor in tensors.items()})
