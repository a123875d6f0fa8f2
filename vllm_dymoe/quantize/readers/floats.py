"""Small floats with scales: FP8, MXFP8, MXFP4 and NVFP4.

Their tensors have different names. Two 4-bit codes share a byte, the first in the low half. Activations stay at 16
bits, so their scales are not needed.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.experts.encoding import FP8, MXFP4, NVFP4
from vllm_dymoe.quantize.held import Held, blocks, check_floats, unpack_pairs
from vllm_dymoe.quantize.readers.base import (
    FLOATS,
    Reader,
    check_shape,
    choose_group_size,
    count_groups,
    ignore,
)

_E4M3, _EXPONENTS, _PAIRS = ("F8_E4M3",), ("U8", "F8_E8M0"), ("U8", "I8")
_MX_GROUP, _NV_GROUP = 32, 16
_GPT_OSS_PARTS = ("blocks", "scales")
_INPUT_SCALE: dict[str, Any] = {"checks": {"input_scale": ignore}}


def fp8(method: str, scale: str = "weight_scale", block: Any = None, **fields: Any) -> Reader:
    """Return the reader for E4M3 with scales.

    There is a scale for each block (rows, columns) of a matrix, for each row, or for all of it. ``weight`` is
    float8_e4m3fn [rows, columns]; the scales are [rows / block, columns / block], rounded up (ModelOpt's have two more
    dimensions of 1), or without a block one number or one for each row. DeepSeek's ``weight_scale_inv`` is a factor in
    spite of its name (DeepSeek-V3, inference/kernel.py, ``weight_dequant``).
    """
    width = None if block is None else choose_group_size(method, block[1])
    cut = None if block is None or width is None else (int(block[0]), width)
    dtypes = {"weight": _E4M3, scale: (*FLOATS, "F8_E8M0")}
    return Reader(method, FP8, width, dtypes, partial(_make_fp8, scale, cut), **_INPUT_SCALE | fields)


def mxfp8(method: str, **fields: Any) -> Reader:
    """Return the reader for E4M3 with exponents as scales.

    ``weight`` is E4M3, ``weight_scale`` uint8 [rows, columns / 32], meaning 2^(byte - 127).
    """
    dtypes = {"weight": _E4M3, "weight_scale": _EXPONENTS}
    return Reader(method, FP8, _MX_GROUP, dtypes, _make_mxfp8, **_INPUT_SCALE | fields)


def mxfp4(method: str, parts: tuple[str, str] = ("weight", "weight_scale"), **fields: Any) -> Reader:
    """Return the reader for codes in bytes, with exponents as scales.

    Codes are int8 or uint8 [rows, columns / 2], exponents uint8 or e8m0 [rows, columns / 32]. An exponent means 2^(byte
    - 127).
    """
    dtypes = dict(zip(parts, (_PAIRS, _EXPONENTS), strict=True))
    return Reader(method, MXFP4, _MX_GROUP, dtypes, partial(_make_mxfp4, parts), **fields)


def gpt_oss() -> Reader:
    """Return the reader for gpt-oss's MXFP4.

    There is one tensor for all experts of a layer, and rows of gate and up alternate. ``blocks`` is uint8 [rows,
    columns / 32, 16] and ``scales`` uint8 [rows, columns / 32] (openai/gpt-oss, gpt_oss/torch/weights.py; transformers'
    ``convert_moe_packed_tensors``).
    """
    return replace(mxfp4("mxfp4", _GPT_OSS_PARTS, ranks_take_groups=True), make=_make_gpt_oss)


def nvfp4(method: str, parts: tuple[str, str, str], *, divides: bool, **fields: Any) -> Reader:
    """Return the reader for E2M1 codes, with scales and a factor.

    Codes are uint8 [rows, columns / 2], scales float8_e4m3fn [rows, columns / 16]. The factor is one float32 for the
    matrix. ModelOpt multiplies the scales by it (qtensor/nvfp4_tensor.py), compressed-tensors divides them by it
    (compressors/nvfp4/base.py).
    """
    dtypes = dict(zip(parts, (("U8",), _E4M3, ()), strict=True))
    return Reader(method, NVFP4, _NV_GROUP, dtypes, partial(_make_nvfp4, parts, divides), **_INPUT_SCALE | fields)


# Module-level functions, because vLLM pickles a configuration with its reader for every worker process.


def _make_fp8(name: str, block: tuple[int, int] | None, parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    weight, scales = parts["weight"], parts[name]
    if block is not None and scales.dim() == 4:
        scales = scales[:, 0, :, 0]
    check_shape("weight", weight, rows, columns)
    if block is None:
        by_row = scales.numel() == rows and scales.dim() > 0 and rows > 1
        scales = scales.reshape(-1, 1)
        block = (1 if by_row else rows), columns
    check_shape(name, scales, -(-rows // block[0]), -(-columns // block[1]))
    codes = weight.view(torch.uint8)
    return check_floats(Held(FP8, codes, scales.float(), blocks(rows, block[0]), blocks(columns, block[1])))


def _make_mxfp8(parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    scales = parts["weight_scale"]
    check_shape("weight_scale", scales, rows, count_groups(columns, _MX_GROUP))
    exponents = scales.contiguous().view(torch.float8_e8m0fnu)
    return _make_fp8("weight_scale", (1, _MX_GROUP), {**parts, "weight_scale": exponents}, rows, columns)


def _make_mxfp4(parts: tuple[str, str], tensors: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    (codes, exponents), (packed, scales) = parts, (tensors[part] for part in parts)
    check_shape(codes, packed, rows, -(-columns // 2))
    check_shape(exponents, scales, rows, count_groups(columns, _MX_GROUP))
    scales = scales.contiguous().view(torch.float8_e8m0fnu)
    unpacked = unpack_pairs(packed.view(torch.uint8))[:, :columns]
    return check_floats(Held(MXFP4, unpacked, scales, torch.arange(rows), blocks(columns, _MX_GROUP)))


def _make_gpt_oss(parts: Mapping[str, Tensor], rows: int, columns: int) -> Held:
    if columns % _MX_GROUP:
        raise ValueError(f"blocks cannot hold {columns} inputs, which is not a multiple of {_MX_GROUP}.")
    packed = parts["blocks"]
    if packed.dim() == 3:
        check_shape("blocks", packed, rows, columns // _MX_GROUP, _MX_GROUP // 2)
        packed = packed.reshape(rows, -1)
    return _make_mxfp4(_GPT_OSS_PARTS, {**parts, "blocks": packed}, rows, columns)


def _make_nvfp4(
    parts: tuple[str, str, str], divides: bool, tensors: Mapping[str, Tensor], rows: int, columns: int
) -> Held:
    packed, scales, number = (tensors[part] for part in parts)
    check_shape(parts[0], packed, rows, -(-columns // 2))
    check_shape(parts[1], scales, rows, count_groups(columns, _NV_GROUP))
    if number.numel() != 1:
        raise ValueError(f"{parts[2]} has shape {list(number.shape)}, expected one number.")
    factor = float(number.float())
    both = (1.0, factor) if divides else (factor, 1.0)
    codes = unpack_pairs(packed)[:, :columns]
    return check_floats(Held(NVFP4, codes, scales, torch.arange(rows), blocks(columns, _NV_GROUP), both))
