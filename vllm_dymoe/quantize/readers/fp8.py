"""FP8 checkpoints of DeepSeek, Qwen, GLM and MiniMax: e4m3 with a scale for each block of a matrix, or one for it all.

``weight`` float8_e4m3fn [rows, columns], and ``weight_scale_inv`` [rows / 128, columns / 128], rounded up, which in
spite of its name is multiplied with (DeepSeek-V3, inference/kernel.py, ``weight_dequant``). Without a block size
``weight_scale``, one number or one for each row. Activations stay at 16 bits, so that their scales are not needed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.kernels.codebook import FP8
from vllm_dymoe.quantize.floats import FloatMatrix, blocks
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.tensors import CheckpointError

_SCALE_DTYPES = (*base.SCALE_DTYPES, torch.float8_e8m0fnu)


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

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (fmt := config.get("fmt", "e4m3")) != "e4m3" or config.get("store_dtype"):
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
