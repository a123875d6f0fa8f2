"""Readers of checkpoints that other tools have quantized: one file for each format."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dymoe.quantize.readers.auto_round import make_auto_round_reader
from vllm_dymoe.quantize.readers.awq import AwqReader
from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.compressed_floats import CompressedFloatsReader
from vllm_dymoe.quantize.readers.compressed_tensors import FLOAT_FORMATS, CompressedTensorsReader, group_of_experts
from vllm_dymoe.quantize.readers.fp8 import Fp8Reader, Mxfp8Reader
from vllm_dymoe.quantize.readers.gptq import GptqReader
from vllm_dymoe.quantize.readers.modelopt import make_modelopt_reader
from vllm_dymoe.quantize.readers.mxfp4 import Mxfp4ExpertsReader, Mxfp4Reader
from vllm_dymoe.quantize.readers.quark import make_quark_reader
from vllm_dymoe.quantize.tensors import CheckpointError


def _make_compressed_tensors(config: Mapping[str, Any]) -> Reader:
    _, fmt = group_of_experts(config)
    return CompressedFloatsReader(config) if fmt in FLOAT_FORMATS else CompressedTensorsReader(config)


def _make_fp8(config: Mapping[str, Any]) -> Reader:
    if config.get("moe_quant_algo"):
        return make_modelopt_reader({"quant_algo": config["moe_quant_algo"]})
    if config.get(EXPERT_DTYPE) == "fp4" or config.get("store_dtype") == "mxfp4":
        return Mxfp4ExpertsReader()
    return Fp8Reader(config)


EXPERT_DTYPE = "expert_dtype"

_READERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    "awq": AwqReader,
    "gptq": GptqReader,
    "auto-round": make_auto_round_reader,
    "compressed-tensors": _make_compressed_tensors,
    "fp8": _make_fp8,
    "mxfp4": Mxfp4Reader,
    "mxfp8": Mxfp8Reader,
    "modelopt": make_modelopt_reader,
    "quark": make_quark_reader,
}

METHODS = tuple(_READERS)
"""Values of ``quant_method`` that :func:`make_reader` knows."""

_NAMES_OF_VLLM = {
    "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "inc": "auto-round",
}
_EXPERTS_APART = ("deepseek_v4", "deepseek_v41")

__all__ = ["EXPERT_DTYPE", "METHODS", "Reader", "make_reader", "with_expert_dtype"]


def with_expert_dtype(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization_config with what DeepSeek-V4's config.json says outside of it: experts are of another format.

    Args:
        config: quantization_config.
        model: the rest of config.json.
    """
    if model.get("model_type") not in _EXPERTS_APART or config.get("quant_method") == "dymoe":
        return dict(config)
    return {**config, EXPERT_DTYPE: model.get(EXPERT_DTYPE) or config.get(EXPERT_DTYPE) or "fp4"}


def make_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a checkpoint's experts.

    Args:
        config: quantization_config of its config.json.

    Raises:
        CheckpointError: a method, or a variant of it, that is not read.
    """
    method = config.get("quant_method") or (config.get("producer") or {}).get("name") or "a method it does not name"
    method = _NAMES_OF_VLLM.get(method, method)
    if method not in _READERS:
        raise CheckpointError(
            f"the checkpoint is quantized with {method} already, and only {', '.join(METHODS)} and 16-bit weights can "
            "be read; use one of those (transformers writes 16-bit weights from most quantized ones: from_pretrained "
            "with dequantize=True in its quantization config, then save_pretrained)."
        )
    return _READERS[method](config)
