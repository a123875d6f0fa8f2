"""AutoAWQ checkpoints, "gemm" packing: transposed, eight outputs in a word, in AutoAWQ's order.

``qweight`` int32 [columns, rows / 8], ``qzeros`` int32 [groups, rows / 8], ``scales`` [groups, rows]. Of the eight
numbers in a word the one in bits 4 i to 4 i + 3 belongs to output _ORDER[i]
(awq/modules/linear/gemm.py, ``WQLinear_GEMM.from_linear``).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.tensors import CheckpointError

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = tuple(_ORDER.index(output) for output in range(8))


class AwqReader(base.Reader):
    """Of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a version or a parameter that is not read.
    """

    method = "awq"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise CheckpointError(
                f'the checkpoint is quantized with awq, version "{version}", and only "gemm" can be read; quantize it '
                'again with version "GEMM".'
            )
        if not config.get("zero_point", True):
            raise CheckpointError(
                "the checkpoint is quantized with awq without zero points, which gemm packing does not have; quantize "
                "it again with zero_point true."
            )
        self.bits = base.choose_bits(self.method, config.get("bits", config.get("w_bit")), (4,))
        self.group_size = base.choose_group_size(self.method, config.get("group_size", config.get("q_group_size")))

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> PrequantizedMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        if rows % 8:
            raise ValueError(f"qweight cannot hold {rows} outputs, which is no multiple of 8.")
        groups = base.count_groups(columns, self.group_size)
        base.check_part("qweight", parts["qweight"], (torch.int32,), columns, rows // 8)
        base.check_part("qzeros", parts["qzeros"], (torch.int32,), groups, rows // 8)
        base.check_part("scales", parts["scales"], base.SCALE_DTYPES, groups, rows)
        codes, zero_points = (self._in_order(parts[name]) for name in ("qweight", "qzeros"))
        return PrequantizedMatrix(
            self.bits, codes.t(), parts["scales"].t(), zero_points.t(), base.neighbours(columns, self.group_size)
        )

    def _in_order(self, words: Tensor) -> Tensor:
        """uint8 [n, outputs] of int32 [n, outputs / 8]."""
        numbers = base.unpack_words(words, self.bits)
        return numbers.view(-1, 8)[:, _PLACE].reshape(numbers.shape)
