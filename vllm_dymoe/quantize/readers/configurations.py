"""From a checkpoint's quantization_config to the reader of its experts."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from vllm_dymoe.experts.encoding import FP8, MXFP4, NVFP4
from vllm_dymoe.quantize.readers import floats, integers
from vllm_dymoe.quantize.readers.base import PLAIN_READER, Reader, ignore, unreadable
from vllm_dymoe.quantize.tensors import CheckpointError

EXPERT_DTYPE = "expert_dtype"

Config = Mapping[str, Any]

_NAMES_OF_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn")  # the last is MiniMax's
_PACK_QUANTIZED = "pack-quantized"
_FLOAT_FORMATS = {
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
    "float-quantized": FP8,
    "naive-quantized": FP8,
    "mxfp8-quantized": FP8,
}
_STRATEGIES = {NVFP4: ("tensor_group",), MXFP4: ("group",), FP8: ("tensor", "channel", "block", "group")}
_NVFP4_OF_MODELOPT = ("weight", "weight_scale", "weight_scale_2")
_MODELOPT: dict[str, Callable[[str], Reader]] = {
    "NVFP4": lambda method: floats.nvfp4(method, _NVFP4_OF_MODELOPT, divides=False),
    "W4A16_NVFP4": lambda method: floats.nvfp4(method, _NVFP4_OF_MODELOPT, divides=False),
    "FP8": floats.fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": floats.fp8,
    "FP8_PB_WO": lambda method: floats.fp8(method, block=(128, 128)),
    "MXFP8": lambda method: floats.mxfp8(method, spellings={"weight_scale_inv": "weight_scale"}),
}
_AUTO_ROUND_FORMATS = {"int": "auto_round:auto_gptq", "fp": "auto_round:fp8", "fp8": "auto_round:fp8"}


def with_expert_dtype(config: Config, model: Config) -> dict[str, Any]:
    """A quantization_config, with the format of experts that DeepSeek-V4's config.json says outside of it."""
    if model.get("model_type") not in ("deepseek_v4", "deepseek_v41") or config.get("quant_method") == "dymoe":
        return dict(config)
    return {**config, EXPERT_DTYPE: model.get(EXPERT_DTYPE) or config.get(EXPERT_DTYPE) or "fp4"}


def make_reader(config: Config | None) -> Reader:
    """The reader of a checkpoint's experts, by its quantization_config; CheckpointError if none reads them."""
    if config is None:
        return PLAIN_READER
    producer = config.get("producer")
    named = producer.get("name") if isinstance(producer, Mapping) else None
    method = config.get("quant_method") or named or "a method it does not name"
    method = _NAMES_OF_VLLM.get(str(method), str(method))
    if method not in _READERS:
        advice = (
            "use one of those (transformers writes 16-bit weights from most quantized ones: from_pretrained with "
            "dequantize=True in its quantization config, then save_pretrained)"
        )
        raise unreadable(f"{method} already", f"{', '.join(METHODS)} and 16-bit weights", advice)
    try:
        return _READERS[method](config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"the quantization_config of the checkpoint is not one that {method} writes ({error}); download the "
            "checkpoint again."
        ) from error


def describe_modelopt(config: Config) -> Config:
    """The part of a configuration that names algorithms: older checkpoints have it one level deeper."""
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


def _fp8(config: Config) -> Reader:
    """Of DeepSeek, Qwen, GLM and MiniMax."""
    if config.get("moe_quant_algo"):
        return _modelopt({"quant_algo": config["moe_quant_algo"]})
    if config.get(EXPERT_DTYPE) == "fp4" or config.get("store_dtype") == "mxfp4":
        # DeepSeek-V4, vllm/models/deepseek_v4/quant_config.py
        return floats.mxfp4("fp8", spellings={"scale": "weight_scale"})
    if (fmt := config.get("fmt") or "e4m3") not in _NAMES_OF_E4M3 or config.get("store_dtype"):
        raise unreadable(f"fp8, {config.get('store_dtype') or fmt}", "e4m3")
    block = config.get("weight_block_size")
    scale = "weight_scale" if block is None else "weight_scale_inv"
    return floats.fp8("fp8", scale, block, spellings={"scale": scale})


def _mxfp8(config: Config) -> Reader:
    if algorithm := config.get("moe_quant_algo"):
        raise CheckpointError(
            f"the checkpoint is quantized with mxfp8 and its experts with {algorithm}, which is not read; use one "
            "with mxfp8 everywhere."
        )
    return floats.mxfp8("mxfp8", spellings={"weight_scale_inv": "weight_scale"})


def _compressed_tensors(config: Config) -> Reader:
    group, fmt = _group_of_experts(config)
    weights = group.get("weights") or {}
    if (book := _FLOAT_FORMATS.get(fmt)) is None:
        if fmt != _PACK_QUANTIZED:
            names = (_PACK_QUANTIZED, *_FLOAT_FORMATS)
            raise _unreadable(f"the format {fmt}", " or ".join(f'"{name}"' for name in names))
        if group.get("input_activations"):
            raise _unreadable("quantized activations", "16-bit activations")
        return integers.pack_quantized(weights, _unreadable)
    strategy, kind = weights.get("strategy"), (weights.get("type"), weights.get("num_bits"))
    if kind != ("float", book.bits) or strategy not in _STRATEGIES[book] or not weights.get("symmetric", True):
        raise _unreadable(
            f'{kind[1]}-bit {kind[0]} weights by "{strategy}" in {fmt}',
            f"symmetric {book.bits}-bit floats by {' or '.join(_STRATEGIES[book])} there",
        )
    method, checks = "compressed-tensors", {"input_scale": ignore, "input_global_scale": ignore}
    if book is NVFP4:
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        return floats.nvfp4(method, parts, divides=True, checks=checks)
    if book is MXFP4:
        return floats.mxfp4(method, ("weight_packed", "weight_scale"), checks=checks)
    if strategy == "group":
        if weights.get("group_size") != 32:
            raise _unreadable(f"groups of {weights.get('group_size')} in {fmt}", "groups of 32 there")
        return floats.mxfp8(method, checks=checks)
    block = weights["block_structure"] if strategy == "block" else None
    return floats.fp8(method, block=block, checks=checks)


def _group_of_experts(config: Config) -> tuple[Config, str]:
    groups = list((config.get("config_groups") or {}).values())
    named = [group for group in groups if any(map(_names_experts, group.get("targets") or ()))]
    groups = named or [group for group in groups if "Linear" in (group.get("targets") or ())] or groups
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    if len(formats) != 1:
        found = f"the format {' and '.join(sorted(formats)) or 'that it does not name'}"
        raise _unreadable(found, "one for all experts")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unreadable(f"the sparse format {sparsity}", "dense ones")
    if any(group.get("weights") != groups[0].get("weights") for group in groups):
        raise _unreadable("several kinds of weights for experts", "one kind for all of them")
    return groups[0], formats.pop()


def _names_experts(target: str) -> bool:
    """Whether a target, the name of modules or "re:" and an expression, means experts."""
    if not target.startswith("re:"):
        return ".experts." in target
    try:
        return any(re.match(target[len("re:") :], name) for name in _names_of_experts())
    except re.error:
        return False


@functools.cache
def _names_of_experts() -> tuple[str, ...]:
    return tuple(
        f"{model}layers.{layer}.{block}.experts.0.{projection}"
        for layer in range(128)
        for model in ("model.", "model.language_model.")
        for block in ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn")
        for projection in ("gate_proj", "w1")
    )


def _unreadable(found: str, readable: str) -> CheckpointError:
    advice = "use such a one, or serve it without --quantization dymoe"
    return unreadable(f"compressed-tensors, {found}", readable, advice)


def _modelopt(config: Config) -> Reader:
    described = describe_modelopt(config)
    algorithm = str(described.get("quant_algo") or "one it does not name").upper()
    if algorithm == "MIXED_PRECISION":
        # Layers of multi-token prediction are often quantized otherwise, or not at all.
        layers = (described.get("quantized_layers") or {}).items()
        experts = [layer for name, layer in layers if re.match(r"(?!mtp\.).*\.experts(\.|$)", name)]
        algorithms = sorted({str(layer.get("quant_algo")).upper() for layer in experts})
        if len(algorithms) != 1:
            found = f"by {' and '.join(algorithms)}" if algorithms else "not at all, or by what it does not name"
            raise unreadable(f"modelopt, its experts {found}", "one algorithm for all of them", "use such a one")
        algorithm, described = algorithms[0], experts[0]
    if algorithm not in _MODELOPT:
        raise unreadable(f"modelopt, algorithm {algorithm}", ", ".join(_MODELOPT))
    reader = _MODELOPT[algorithm]("modelopt")
    if reader.encoding is NVFP4 and described.get("group_size") not in (None, reader.group_size):
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt in groups of {described['group_size']}, and {algorithm} has "
            f"groups of {reader.group_size}; download its config.json again."
        )
    return reader


def _quark(config: Config) -> Reader:
    """AMD Quark's, which lie as compressed-tensors' do (vLLM, quantization/quark/quark_moe.py).

    A layer's format is that of the first pattern of ``layer_quant_config`` that fits its name, else
    ``global_quant_config``.
    """
    rules: Config = config.get("layer_quant_config") or {}
    found: list[Config] = []
    names = (f"model.layers.{n}.mlp.experts.0.{part}_proj" for n in range(128) for part in ("gate", "up", "down"))
    for name in names:
        rule = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
        said = (config.get("global_quant_config") if rule is None else rule) or {}
        weights = said.get("weight") or {}
        if isinstance(weights, list) and len(weights) == 1:
            weights = weights[0]
        if not isinstance(weights, Mapping) or (found and weights != found[0]):
            raise CheckpointError(
                "the checkpoint is quantized with quark, its experts in several formats, which cannot be read; use one "
                "with the same format for all experts."
            )
        found.append(weights)
    kind, scheme, groups = found[0].get("dtype"), found[0].get("qscheme"), found[0].get("group_size")
    if (kind, scheme, groups, found[0].get("scale_format")) == ("fp4", "per_group", 32, "e8m0"):
        return floats.mxfp4("quark", spellings={"scale": "weight_scale"})
    if kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return floats.fp8("quark", spellings={"scale": "weight_scale"})
    raise unreadable(f"quark, experts in {kind} {scheme}", "MXFP4 and fp8_e4m3 by tensor or channel")


def _auto_round(config: Config) -> Reader:
    """AutoRound's own name around the layouts of AutoGPTQ, AutoAWQ, FP8 blocks and MXFP (auto_round/export)."""
    for name, rule in (config.get("extra_config") or {}).items():
        different = any(key in rule and rule[key] != config.get(key) for key in ("bits", "group_size", "sym"))
        if "experts" in str(name) and different:
            raise CheckpointError(
                f'the checkpoint is quantized with auto-round and has another format for "{name}" '
                "(extra_config), which cannot be read; use one whose experts have the same format everywhere."
            )
    bits, group_size, kind = config.get("bits"), config.get("group_size"), str(config.get("data_type") or "int")
    layout = str(config.get("packing_format") or _AUTO_ROUND_FORMATS.get(kind, "auto_round:llm_compressor"))
    if kind == "int" and layout.endswith("gptq"):
        reader = integers.gptq({"bits": bits, "group_size": group_size, "sym": config.get("sym", True)})
    elif kind == "int" and layout.endswith("awq"):
        reader = integers.awq({"bits": bits, "group_size": group_size})
    elif layout == "auto_round:fp8" and isinstance(group_size, list | tuple):
        reader = _fp8({"weight_block_size": group_size})
    elif layout == "auto_round:llm_compressor" and kind.startswith("mx_fp") and bits in (4, 8):
        weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": group_size}
        layout = f"mxfp{bits}-{'pack-' if bits == 4 else ''}quantized"
        group = {"targets": ["Linear"], "weights": weights}
        reader = _compressed_tensors({"format": layout, "config_groups": {"experts": group}})
    else:
        raise CheckpointError(
            f'the checkpoint is quantized with auto-round, {kind} at {bits} bits in "{layout}", which cannot be read; '
            "export it with --format auto_gptq, auto_awq, or with 16-bit weights."
        )
    return replace(reader, method="auto-round")


_READERS: dict[str, Callable[[Config], Reader]] = {
    "awq": integers.awq,
    "gptq": integers.gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": lambda config: floats.gpt_oss(),
    "mxfp8": _mxfp8,
    "modelopt": _modelopt,
    "quark": _quark,
}

METHODS = tuple(_READERS)

_NAMES_OF_VLLM = {
    "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "inc": "auto-round",
}
