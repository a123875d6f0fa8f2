"""MXFP4 as gpt-oss and DeepSeek-V4 have it: two codes in a byte, one exponent for 32 of them.

gpt-oss has all experts of a layer in one tensor:
``blocks`` uint8 [rows, columns / 32, 16] and ``scales`` uint8 [rows, columns / 32], a scale being 2^(byte - 127)
(openai/gpt-oss, gpt_oss/torch/weights.py; transformers' ``convert_moe_packed_tensors``). Rows of gate and up alternate.
DeepSeek-V4 has a matrix for each projection: ``weight`` int8 [rows, columns / 2], the first code in the low half, and
``scale`` e8m0 [rows, columns / 32]; everything else is FP8 (vllm/models/deepseek_v4/quant_config.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix, blocks, unpack_pairs
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.residency.code import MXFP4

_GROUP = 32


class Mxfp4Reader(base.Reader):
    """Of a ``quantization_config`` of config.json, in which nothing varies."""

    method = "mxfp4"
    bits = MXFP4.bits
    group_size = _GROUP
    asymmetric = False
    codebook = MXFP4
    ranks_take_groups = True
    parts = ("blocks", "scales")
    scale_dtypes = base.EXPONENTS

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        if columns % _GROUP:
            raise ValueError(f"blocks cannot hold {columns} inputs, which is no multiple of {_GROUP}.")
        packed, scales = parts["blocks"], parts["scales"]
        if packed.dim() == 3:
            base.check_part("blocks", packed, (torch.uint8,), rows, columns // _GROUP, _GROUP // 2)
            packed = packed.reshape(rows, -1)
        return read_mxfp4(("blocks", packed), ("scales", scales), rows, columns)


class Mxfp4ExpertsReader(base.Reader):
    """Of the experts of a checkpoint whose dense layers are FP8."""

    method = "fp8"
    bits = MXFP4.bits
    group_size = _GROUP
    asymmetric = False
    codebook = MXFP4
    parts = ("weight", "weight_scale")
    scale_dtypes = base.EXPONENTS
    spellings = {"scale": "weight_scale"}  # noqa: RUF012

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        packed, scales = ((name, parts[name]) for name in self.parts)
        return read_mxfp4(packed, scales, rows, columns)


def read_mxfp4(packed: tuple[str, Tensor], scales: tuple[str, Tensor], rows: int, columns: int) -> FloatMatrix:
    """A matrix of codes uint8 [rows, columns / 2] and exponents uint8 [rows, columns / 32], each with its name.

    Raises:
        ValueError: they are something else.
    """
    base.check_part(*packed, (torch.uint8, torch.int8), rows, -(-columns // 2))
    base.check_part(*scales, (torch.uint8, torch.float8_e8m0fnu), rows, base.count_groups(columns, _GROUP))
    codes = unpack_pairs(packed[1].view(torch.uint8))[:, :columns]
    exponents = scales[1].contiguous().view(torch.float8_e8m0fnu)
    return FloatMatrix(MXFP4, codes, exponents, torch.arange(rows), blocks(columns, _GROUP))
