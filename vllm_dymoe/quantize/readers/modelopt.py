"""ModelOpt checkpoints: NVFP4 and FP8.

NVFP4 is ``weight`` uint8 [rows, columns / 2], ``weight_scale`` float8_e4m3fn [rows, columns / 16] and
``weight_scale_2``, one float32; FP8 is ``weight`` float8_e4m3fn [rows, columns] and ``weight_scale``, one float32.
Activations stay at 16 bits, so that ``input_scale`` is not needed.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_dymoe.kernels.codebook import FP8, NVFP4
from vllm_dymoe.quantize.floats import FloatMatrix
from vllm_dymoe.quantize.readers import base
from vllm_dymoe.quantize.readers.fp8 import read_fp8
from vllm_dymoe.quantize.readers.nvfp4 import GROUP, read_nvfp4
from vllm_dymoe.quantize.tensors import CheckpointError


def make_modelopt_reader(config: Mapping[str, Any]) -> base.Reader:
    """The reader of a ``quantization_config`` of config.json, or of hf_quant_config.json.

    Raises:
        CheckpointError: an algorithm that is not read.
    """
    inner = config.get("quantization")
    described = inner if isinstance(inner, Mapping) else config
    algorithm = str(described.get("quant_algo", "one it does not name")).upper()
    if algorithm not in _READERS:
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt, algorithm {algorithm}, and only {', '.join(_READERS)} can be "
            "read; use one of those."
        )
    reader = _READERS[algorithm]()
    if reader.group_size is not None and described.get("group_size") not in (None, reader.group_size):
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt in groups of {described['group_size']}, and {algorithm} has "
            f"groups of {reader.group_size}; download its config.json again."
        )
    return reader


class _Nvfp4(base.Reader):
    method = "modelopt"
    bits = NVFP4.bits
    group_size = GROUP
    asymmetric = False
    codebook = NVFP4
    parts = ("weight", "weight_scale", "weight_scale_2")
    checked = ("input_scale",)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        packed, number = ("weight", parts["weight"]), ("weight_scale_2", parts["weight_scale_2"])
        return read_nvfp4(packed, parts["weight_scale"], number, rows, columns, divides=False)


class _Fp8(base.Reader):
    method = "modelopt"
    bits = FP8.bits
    group_size = None
    asymmetric = False
    codebook = FP8
    parts = ("weight", "weight_scale")
    checked = ("input_scale",)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> FloatMatrix:
        """See :class:`Reader <vllm_dymoe.quantize.readers.base.Reader>`."""
        return read_fp8(parts["weight"], "weight_scale", parts["weight_scale"], rows, columns)


_READERS: dict[str, type[base.Reader]] = {"NVFP4": _Nvfp4, "W4A16_NVFP4": _Nvfp4, "FP8": _Fp8}
