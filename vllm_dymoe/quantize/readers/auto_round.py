"""AutoRound's checkpoints: its own name around the layouts of AutoGPTQ, AutoAWQ, FP8 blocks and MXFP.

``packing_format`` says which (auto_round/export); what the tool has rounded otherwise than others is in the codes.
"""

from collections.abc import Mapping
from typing import Any

from vllm_dymoe.quantize.readers.awq import AwqReader
from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.compressed_floats import CompressedFloatsReader
from vllm_dymoe.quantize.readers.fp8 import Fp8Reader
from vllm_dymoe.quantize.readers.gptq import GptqReader
from vllm_dymoe.quantize.tensors import CheckpointError

_FORMAT_OF_TYPE = {"int": "auto_round:auto_gptq", "fp": "auto_round:fp8", "fp8": "auto_round:fp8"}
_RULES = ("bits", "group_size", "sym")


def make_auto_round_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a layout or a parameter that is not read, or experts of several formats.
    """
    _refuse_mixed_experts(config)
    bits, group_size, kind = config.get("bits"), config.get("group_size"), str(config.get("data_type") or "int")
    layout = str(config.get("packing_format") or _FORMAT_OF_TYPE.get(kind, "auto_round:llm_compressor"))
    reader: Reader
    if kind == "int" and layout.endswith("gptq"):
        reader = GptqReader({"bits": bits, "group_size": group_size, "sym": config.get("sym", True)})
    elif kind == "int" and layout.endswith("awq"):
        reader = AwqReader({"bits": bits, "group_size": group_size})
    elif layout == "auto_round:fp8" and isinstance(group_size, list | tuple):
        reader = Fp8Reader({"weight_block_size": group_size})
    elif layout == "auto_round:llm_compressor" and kind.startswith("mx_fp") and bits in (4, 8):
        weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": group_size}
        layout = f"mxfp{bits}-{'pack-' if bits == 4 else ''}quantized"
        group = {"targets": ["Linear"], "weights": weights}
        reader = CompressedFloatsReader({"format": layout, "config_groups": {"experts": group}})
    else:
        raise CheckpointError(
            f'the checkpoint is quantized with auto-round, {kind} at {bits} bits in "{layout}", which cannot be read; '
            "export it with --format auto_gptq, auto_awq, or with 16-bit weights."
        )
    reader.method = "auto-round"
    return reader


def _refuse_mixed_experts(config: Mapping[str, Any]) -> None:
    for name, rule in (config.get("extra_config") or {}).items():
        if "experts" in str(name) and any(key in rule and rule[key] != config.get(key) for key in _RULES):
            raise CheckpointError(
                f'the checkpoint is quantized with auto-round and has another format for "{name}" '
                "(extra_config), which cannot be read; use one whose experts have the same format everywhere."
            )
