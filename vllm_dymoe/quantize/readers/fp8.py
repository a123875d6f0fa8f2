"""FP8 checkpoints of DeepSeek, Qwen, GLM and MiniMax: e4m3 with a scale for each block of a matrix, or one for it all.
MXFP8, where a block is 32 columns of a row and its scale an exponent.

``weight`` float8_e4m3fn [rows, columns], and ``weight_scale_inv`` [rows / 128, columns / 128], rounded up, which in
spite of its name is multiplied with (DeepSeek-V3, inference/kernel.py, ``weight_dequant``). Without a block size
``weight_scale``, one number or one for each row. MXFP8 has ``weight_scale`` uint8 [rows, columns / 32], 2^(byte - 127).
Activations stay at 16 bits, so that their scales are not needed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix, blocks
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import FP8

_SCALE_DTYPES = (*base.SCALE_DTYPES, torch.float8_e8m0fnu)
_NAMES_OF_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn")  # the last is MiniMax's
MXFP8_GROUP = 32


class Fp8Reader(base.Reader):
    """Of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a variant that is not read.
    """

    method = "fp8"
    bits = FP8.bits
    asymmetric = False
    codebook = FP8
    checked = ("input_scale",)
    scale_dtypes = base.NUMBERS

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (fmt := config.get("fmt") or "e4m3") not in _NAMES_OF_E4M3 or config.get("store_dtype"):
            raise CheckpointError(
                f"the checkpoint is quantized with fp8, {config.get('store_dtype') or fmt}, and only e4m3 can be read; "
                "use one of those."
            )
        block = config.get("weight_block_size")
        self.group_size = None
        self._row_block = None
        if block is not None:
            self._row_block, self.group_size = int(block[0]), base.choose_group_size(self.method, block[1])
        self.parts = ("weight", "weight_scale" if block is None else "weight_scale_inv")
        self.spellings = {"scale": self.parts[1]}

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        name = self.parts[1]
        if self.group_size is None:
            return read_fp8(parts["weight"], name, parts[name], rows, columns)
        assert self._row_block is not None
        return read_fp8(parts["weight"], name, parts[name], rows, columns, (self._row_block, self.group_size))


def read_fp8(
    weight: Tensor, name: str, scales: Tensor, rows: int, columns: int, block: tuple[int, int] | None = None
) -> FloatMatrix:
    """A matrix of e4m3 with a scale for each block [rows, columns], or one for all, or one for each row.

    Raises:
        ValueError: it is something else; ``name`` is that of the scales.
    """
    base.check_part("weight", weight, (torch.float8_e4m3fn,), rows, columns)
    if block is None:
        by_row = scales.numel() == rows and scales.dim() > 0 and rows > 1
        scales = scales.reshape(-1, 1)
        block = (1 if by_row else rows), columns
    shape = -(-rows // block[0]), -(-columns // block[1])
    base.check_part(name, scales, _SCALE_DTYPES, *shape)
    return FloatMatrix(FP8, weight.view(torch.uint8), scales.float(), blocks(rows, block[0]), blocks(columns, block[1]))


class Mxfp8Reader(base.Reader):
    """Of a ``quantization_config`` of config.json, in which nothing varies.

    Raises:
        CheckpointError: its experts are quantized otherwise than the rest.
    """

    method = "mxfp8"
    bits = FP8.bits
    group_size = MXFP8_GROUP
    asymmetric = False
    codebook = FP8
    parts = ("weight", "weight_scale")
    checked = ("input_scale",)
    scale_dtypes = base.EXPONENTS
    spellings = {"weight_scale_inv": "weight_scale"}  # noqa: RUF012

    def __init__(self, config: Mapping[str, Any]) -> None:
        if algorithm := config.get("moe_quant_algo"):
            raise CheckpointError(
                f"the checkpoint is quantized with mxfp8 and its experts with {algorithm}, which is not read; use one "
                "with mxfp8 everywhere."
            )

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        return read_mxfp8(parts["weight"], parts["weight_scale"], rows, columns)


def read_mxfp8(weight: Tensor, scales: Tensor, rows: int, columns: int) -> FloatMatrix:
    """A matrix of e4m3 with an exponent, uint8 or e8m0, for 32 columns.

    Raises:
        ValueError: it is something else.
    """
    groups = base.count_groups(columns, MXFP8_GROUP)
    base.check_part("weight_scale", scales, (torch.uint8, torch.float8_e8m0fnu), rows, groups)
    exponents = scales.contiguous().view(torch.float8_e8m0fnu)
    return read_fp8(weight, "weight_scale", exponents, rows, columns, (1, MXFP8_GROUP))
