"""Writes golden/*.safetensors with the formats' own packing code; kept so that anyone can repeat it.

    pip install torch transformers compressed-tensors==0.17.0
    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
    pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-0.7.1-*.whl -d auto-gptq
    PYTHONPATH=.:autoawq-0.2.9:auto-gptq python tests/quantize/readers/make_golden.py

Each file has the tensors as the tool packed them, ``codes`` and ``zero_points`` that it was given, and ``weights``:
what the tool's own code makes of the packed tensors again.
"""

import importlib.util
import sys
import types
from pathlib import Path

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


MAKERS = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors-4-group": lambda: compressed_tensors(4, 64, True),
    "compressed-tensors-8-channel": lambda: compressed_tensors(8, None, True),
    "compressed-tensors-4-asymmetric": lambda: compressed_tensors(4, 64, False),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        tensors = {key: tensor.detach().contiguous() for key, tensor in MAKERS[name]().items()}
        save_file(tensors, GOLDEN / f"{name}.safetensors")
        print(name, {key: (tensor.dtype, list(tensor.shape)) for key, tensor in tensors.items()})
