"""ModelOpt checkpoints: NVFP4, FP8 and MXFP8.

NVFP4 is ``weight`` uint8 [rows, columns / 2], ``weight_scale`` float8_e4m3fn [rows, columns / 16] and
``weight_scale_2``, one float32; FP8 is ``weight`` float8_e4m3fn [rows, columns] and ``weight_scale``, one float32, one
for each row, or one for each block of 128 x 128. Activations stay at 16 bits, so that ``input_scale`` is not needed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vllm_dymoe.quantize.floats import FloatMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.readers.fp8 import Mxfp8Reader, read_fp8
from vllm_dymoe.quantize.readers.nvfp4 import GROUP, read_nvfp4
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import FP8, NVFP4

_MIXED = "MIXED_PRECISION"
_BLOCK = 128


def make_modelopt_reader(config: Mapping[str, Any]) -> base.Reader:
    """The reader of a ``quantization_config`` of config.json, or of hf_quant_config.json.

    Raises:
        CheckpointError: an algorithm that is not read.
    """
    described = describe_modelopt(config)
    algorithm = str(described.get("quant_algo") or "one it does not name").upper()
    if algorithm == _MIXED:
        algorithm, described = _of_experts(described.get("quantized_layers") or {})
    if algorithm not in _READERS:
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt, algorithm {algorithm}, and only {', '.join(_READERS)} can be "
            "read; use one of those."
        )
    reader = _READERS[algorithm]()
    if reader.codebook is NVFP4 and described.get("group_size") not in (None, reader.group_size):
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt in groups of {described['group_size']}, and {algorithm} has "
            f"groups of {reader.group_size}; download its config.json again."
        )
    return reader


def describe_modelopt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that names algorithms: older checkpoints have it one level deeper."""
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


def _of_experts(layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The one algorithm of experts where each layer has its own, and how one of them is described.

    Raises:
        CheckpointError: there are several, or none.
    """
    # Layers of multi-token prediction are often quantized otherwise, or not at all.
    experts = [layer for name, layer in layers.items() if re.match(r"(?!mtp\.).*\.experts(\.|$)", name)]
    algorithms = sorted({str(layer.get("quant_algo")).upper() for layer in experts})
    if len(algorithms) != 1:
        found = f"by {' and '.join(algorithms)}" if algorithms else "not at all, or by what it does not name"
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt, its experts {found}, and only one algorithm for all of them "
            "can be read; use such a one."
        )
    return algorithms[0], experts[0]


class _Nvfp4(base.Reader):
    method = "modelopt"
    bits = NVFP4.bits
    group_size = GROUP
    asymmetric = False
    codebook = NVFP4
    parts = ("weight", "weight_scale", "weight_scale_2")
    checked = ("input_scale",)
    scale_dtypes = ("F8_E4M3",)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        packed, number = ("weight", parts["weight"]), ("weight_scale_2", parts["weight_scale_2"])
        return read_nvfp4(packed, parts["weight_scale"], number, rows, columns, divides=False)


class _Fp8(base.Reader):
    method = "modelopt"
    bits = FP8.bits
    asymmetric = False
    codebook = FP8
    parts = ("weight", "weight_scale")
    checked = ("input_scale",)
    scale_dtypes = base.NUMBERS

    def __init__(self, block: int | None = None) -> None:
        self.group_size = block

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        scales, block = parts["weight_scale"], None
        if self.group_size is not None:
            block = self.group_size, self.group_size
            scales = scales[:, 0, :, 0] if scales.dim() == 4 else scales  # a dimension for each of a block's
        return read_fp8(parts["weight"], "weight_scale", scales, rows, columns, block)


class _Mxfp8(Mxfp8Reader):
    method = "modelopt"

    def __init__(self) -> None:
        super().__init__({})


_READERS: dict[str, Callable[[], base.Reader]] = {
    "NVFP4": _Nvfp4,
    "W4A16_NVFP4": _Nvfp4,
    "FP8": _Fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _Fp8,
    "FP8_PB_WO": lambda: _Fp8(_BLOCK),
    "MXFP8": _Mxfp8,
}
