"""NVFP4 as both of its writers have it: e2m1, an e4m3 scale for 16 columns, and one number for the whole matrix.

Two codes in a byte, the first in the low half: uint8 [rows, columns / 2]; scales float8_e4m3fn [rows, columns / 16].
ModelOpt multiplies scales with its number (qtensor/nvfp4_tensor.py), compressed-tensors divides them by its own
(compressors/nvfp4/base.py).
"""

import torch
from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix, blocks, unpack_pairs
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.residency.code import NVFP4

GROUP = 16


def read_nvfp4(
    packed: tuple[str, Tensor], scales: Tensor, number: tuple[str, Tensor], rows: int, columns: int, *, divides: bool
) -> FloatMatrix:
    """A matrix of these tensors, two of them with their names.

    Raises:
        ValueError: they are something else.
    """
    base.check_part(*packed, (torch.uint8,), rows, -(-columns // 2))
    base.check_part("weight_scale", scales, (torch.float8_e4m3fn,), rows, base.count_groups(columns, GROUP))
    name, factor = number
    if factor.numel() != 1:
        raise ValueError(f"{name} has shape {list(factor.shape)}, expected one number.")
    both = (1.0, float(factor.float())) if divides else (float(factor.float()), 1.0)
    codes = unpack_pairs(packed[1])[:, :columns]
    return FloatMatrix(NVFP4, codes, scales, torch.arange(rows), blocks(columns, GROUP), both)
