"""Readers of checkpoints that other tools have quantized: one file for each format."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dymoe.quantize.readers.awq import AwqReader
from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.compressed_floats import CompressedFloatsReader
from vllm_dymoe.quantize.readers.compressed_tensors import FLOAT_FORMATS, CompressedTensorsReader
from vllm_dymoe.quantize.readers.fp8 import Fp8Reader
from vllm_dymoe.quantize.readers.gptq import GptqReader
from vllm_dymoe.quantize.readers.modelopt import make_modelopt_reader
from vllm_dymoe.quantize.readers.mxfp4 import Mxfp4Reader
from vllm_dymoe.quantize.tensors import CheckpointError


def _make_compressed_tensors(config: Mapping[str, Any]) -> Reader:
    groups = (config.get("config_groups") or {}).values()
    floats = any((group.get("format") or config.get("format")) in FLOAT_FORMATS for group in groups)
    return CompressedFloatsReader(config) if floats else CompressedTensorsReader(config)


_READERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "compressed-tensors": _make_compressed_tensors,
    "fp8": Fp8Reader,
    "mxfp4": Mxfp4Reader,
    "modelopt": make_modelopt_reader,
}

METHODS = tuple(_READERS)
"""Values of ``quant_method`` that :func:`make_reader` knows."""

_NAMES_OF_VLLM = {"gpt_oss_mxfp4": "mxfp4"}

__all__ = ["METHODS", "Reader", "make_reader"]


def make_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a checkpoint's experts.

    Args:
        config: quantization_config of its config.json.

    Raises:
        CheckpointError: a method, or a variant of it, that is not read.
    """
    method = config.get("quant_method", "a method it does not name")
    method = _NAMES_OF_VLLM.get(method, method)
    if method not in _READERS:
        raise CheckpointError(
            f"the checkpoint is quantized with {method} already, and only {', '.join(METHODS)} and 16-bit weights can "
            "be read; use one of those (transformers writes 16-bit weights from most quantized ones: from_pretrained "
            "with dequantize=True in its quantization config, then save_pretrained)."
        )
    return _READERS[method](config)
