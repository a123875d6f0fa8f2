"""compressed-tensors checkpoints of floats: nvfp4-pack-quantized, mxfp4-pack-quantized, float- and mxfp8-quantized.

At 4 bits ``weight_packed`` uint8 [rows, columns / 2] and ``weight_scale``: for NVFP4 float8_e4m3fn [rows, columns / 16]
beside ``weight_global_scale``, one float32; for MXFP4 uint8 [rows, columns / 32]. At 8 bits ``weight`` float8_e4m3fn
[rows, columns] and ``weight_scale`` [1], [rows, 1] or one for each block, or uint8 [rows, columns / 32] (MXFP8).
Activations stay at 16 bits, so that their scales are not needed.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.readers.compressed_tensors import FLOAT_FORMATS, group_of_experts, unreadable
from vllm_dymoe.quantize.readers.fp8 import MXFP8_GROUP, read_fp8, read_mxfp8
from vllm_dymoe.quantize.readers.mxfp4 import read_mxfp4
from vllm_dymoe.quantize.readers.nvfp4 import read_nvfp4
from vllm_dymoe.residency.code import FP8, MXFP4, NVFP4

_STRATEGIES = {NVFP4: ("tensor_group",), MXFP4: ("group",), FP8: ("tensor", "channel", "block", "group")}


class CompressedFloatsReader(base.Reader):
    """Of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a format or a parameter that is not read.
    """

    method = "compressed-tensors"
    asymmetric = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        group, fmt = group_of_experts(config)
        weights = group.get("weights") or {}
        book = self.codebook = FLOAT_FORMATS[fmt]
        strategy = weights.get("strategy")
        kind = weights.get("type"), weights.get("num_bits")
        if kind != ("float", book.bits) or strategy not in _STRATEGIES[book] or not weights.get("symmetric", True):
            raise unreadable(
                f'{kind[1]}-bit {kind[0]} weights by "{strategy}" in {fmt}',
                f"symmetric {book.bits}-bit floats by {' or '.join(_STRATEGIES[book])} there",
            )
        self.bits = book.bits
        self._block: tuple[int, int] | None = None
        self.group_size = book.group_size
        if strategy == "group" and book is FP8:
            self.group_size = MXFP8_GROUP
            if weights.get("group_size") != MXFP8_GROUP:
                raise unreadable(f"groups of {weights.get('group_size')} in {fmt}", f"groups of {MXFP8_GROUP} there")
        if strategy == "block":
            rows, columns = weights["block_structure"]
            self.group_size = base.choose_group_size(self.method, columns)
            self._block = int(rows), int(columns)
        if book is FP8:
            self.parts = ("weight", "weight_scale")
        else:
            self.parts = ("weight_packed", "weight_scale", *(("weight_global_scale",) if book is NVFP4 else ()))
        self.checked = ("input_scale", "input_global_scale")
        exponents = book is MXFP4 or (book is FP8 and strategy == "group")
        self.scale_dtypes = base.EXPONENTS if exponents else ("F8_E4M3",) if book is NVFP4 else base.NUMBERS

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        scales = parts["weight_scale"]
        if self.codebook is FP8 and self.group_size == MXFP8_GROUP and self._block is None:
            return read_mxfp8(parts["weight"], scales, rows, columns)
        if self.codebook is FP8:
            return read_fp8(parts["weight"], "weight_scale", scales, rows, columns, self._block)
        packed = "weight_packed", parts["weight_packed"]
        if self.codebook is MXFP4:
            return read_mxfp4(packed, ("weight_scale", scales), rows, columns)
        number = "weight_global_scale", parts["weight_global_scale"]
        return read_nvfp4(packed, scales, number, rows, columns, divides=True)
