"""Readers of checkpoints that other tools have quantized: one file for each format."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dymoe.quantize.readers.awq import AwqReader
from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.compressed_tensors import CompressedTensorsReader
from vllm_dymoe.quantize.readers.gptq import GptqReader
from vllm_dymoe.quantize.tensors import CheckpointError

_READERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "compressed-tensors": CompressedTensorsReader,
}

METHODS = tuple(_READERS)
"""Values of ``quant_method`` that :func:`make_reader` knows."""

__all__ = ["METHODS", "Reader", "make_reader"]


def make_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a checkpoint's experts.

    Args:
        config: quantization_config of its config.json.

    Raises:
        CheckpointError: a method, or a variant of it, that is not read.
    """
    method = config.get("quant_method", "a method it does not name")
    if method not in _READERS:
        raise CheckpointError(
            f"the checkpoint is quantized with {method} already, and only {', '.join(METHODS)} and 16-bit weights can "
            "be read; use one of those (transformers writes 16-bit weights from most quantized ones: from_pretrained "
            "with dequantize=True in its quantization config, then save_pretrained)."
        )
    return _READERS[method](config)
