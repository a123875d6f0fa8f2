"""From a checkpoint's quantization_config to the reader of its experts.

Each method has two functions: one finds the rule for a matrix, the other makes the reader for a rule. Matrices whose
tensors are known to have 16 bits have no rule.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from vllm_dymoe.experts.encoding import FP8, MXFP4, NVFP4
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.quantize.readers import floats, integers
from vllm_dymoe.quantize.readers.base import PLAIN_READER, MixedReader, Reader, ignore, unreadable
from vllm_dymoe.quantize.readers.modules import (
    ExpertModule,
    excluded,
    guessed_modules,
    matches,
    representatives,
)
from vllm_dymoe.quantize.tensors import CheckpointError

EXPERT_DTYPE = "expert_dtype"
_OF_EXPERTS = (EXPERT_DTYPE, "moe_quant_algo", "store_dtype")  # keys that say how experts differ from the rest

Config = Mapping[str, Any]
Names = Collection[str]  # of a matrix, see ``ExpertModule.aliases``

_NAMES_OF_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn")  # the last is MiniMax's
_PACK_QUANTIZED, _INT_QUANTIZED, _NAIVE_QUANTIZED = "pack-quantized", "int-quantized", "naive-quantized"
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
_OF_EXPRESSIONS = frozenset("*+?^$()[]{}|\\")
_AUTO_ROUND_FORMATS = {"int": "auto_round:auto_gptq", "fp": "auto_round:fp8", "fp8": "auto_round:fp8"}


def with_expert_dtype(config: Config, model: Config) -> dict[str, Any]:
    """Return a quantization_config that includes the format of the experts.

    DeepSeek-V4's config.json has it outside of quantization_config.
    """
    if model.get("model_type") not in ("deepseek_v4", "deepseek_v41") or config.get("quant_method") == "dymoe":
        return dict(config)
    return {**config, EXPERT_DTYPE: model.get(EXPERT_DTYPE) or config.get(EXPERT_DTYPE) or "fp4"}


def make_reader(config: Config | None, modules: Sequence[ExpertModule] | None = None) -> Reader:
    """Return the reader for some experts.

    The quantization_config and what is known of their tensors decide. Raises CheckpointError if no reader reads them,
    or if experts of one layer have several formats.
    """
    found = make_readers(config, modules)
    if len(found) == 1:
        return next(iter(found))
    readers: dict[tuple[int, Projection], Reader] = {}
    for reader, where in found.items():
        for module in where:
            for projection in module.projections:
                if readers.setdefault((module.layer, projection), reader) is not reader:
                    raise _several(found, "a layer's experts need one format for each projection")
    # vLLM cuts such stacks into parts for tensor-parallel ranks.
    if any(reader.ranks_take_groups for reader in found):
        raise _several(found, "in this model one tensor holds all experts of a layer, so they need one format")
    return MixedReader.of(readers)


def _several(found: Mapping[Reader, Sequence[ExpertModule]], why: str) -> CheckpointError:
    several = sorted(found.items(), key=lambda item: -len(item[1]))
    said = " and ".join(f"{reader.summary} ({_places(where)})" for reader, where in several)
    return CheckpointError(
        f"the experts of the checkpoint have several formats: {said}; {why}. Use another checkpoint, or serve it "
        "without --quantization dymoe."
    )


def make_readers(
    config: Config | None, modules: Sequence[ExpertModule] | None = None
) -> dict[Reader, list[ExpertModule]]:
    """Return the readers for some experts, and the modules that each one reads.

    Raises CheckpointError if none reads them.
    """
    known = modules is not None
    modules = guessed_modules() if modules is None else modules
    if config is None or not modules:
        return {PLAIN_READER: list(modules)}
    method = check_method(config)
    rule_of, reader_of = _METHODS[method]
    made: dict[str, Reader] = {}
    found: dict[object, tuple[Reader, list[ExpertModule]]] = {}
    with _valid_for(method):
        for module in representatives(config, modules):
            names = module.aliases
            plain = excluded(config, names) if module.plain is None else module.plain
            rule = None if plain else rule_of(config, names)
            key = json.dumps(rule, sort_keys=True, default=str)
            if key not in made:
                made[key] = PLAIN_READER if rule is None else reader_of(rule)
            found.setdefault(made[key].format, (made[key], []))[1].append(module)
    if not known and len(found) > 1:  # guessed layers need not exist
        found.pop(PLAIN_READER.format, None)
    return dict(found.values())


def make_dense_reader(config: Config, names: Names) -> Reader:
    """Return the reader for a matrix outside of experts, by its names.

    vLLM computes MXFP4 of gpt-oss outside of experts at 16 bits. Raises CheckpointError if no reader reads the matrix.
    """
    method = check_method(config)
    said = {key: value for key, value in config.items() if key not in _OF_EXPERTS}
    rule_of, reader_of = _METHODS[method]
    with _valid_for(method):
        rule = None if method == "mxfp4" or excluded(said, names) else rule_of(said, names)
        return PLAIN_READER if rule is None else reader_of(rule)


@contextlib.contextmanager
def _valid_for(method: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"the quantization_config of the checkpoint is not valid for {method} ({error}); correct it, or "
            "download config.json again."
        ) from error


def _are_experts(names: Names) -> bool:
    return any(".experts." in name for name in names)


def check_method(config: Config) -> str:
    """Return the method of a quantization_config, by its tool's name.

    Raises CheckpointError if it is not supported.
    """
    producer = config.get("producer")
    named = producer.get("name") if isinstance(producer, Mapping) else None
    method = config.get("quant_method") or named or "an unnamed method"
    method = _NAMES_OF_VLLM.get(str(method), str(method))
    if method not in _METHODS:
        advice = (
            "use one of those (transformers writes 16-bit weights from most quantized ones: from_pretrained with "
            "dequantize=True in its quantization config, then save_pretrained)"
        )
        raise unreadable(f"{method} already", f"{', '.join(METHODS)} and 16-bit weights", advice)
    return method


def _places(modules: Sequence[ExpertModule]) -> str:
    """Return in a few words where some matrices are."""
    layers = sorted({module.layer for module in modules})
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    named = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"in layer{'s' * (len(layers) > 1)} {named}, {modules[0].name} for one"


def describe_modelopt(config: Config) -> Config:
    """Return the part of a configuration that names algorithms.

    Older checkpoints have it one level deeper.
    """
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


def _fp8(config: Config) -> Reader:
    """Return the reader for FP8 of DeepSeek, Qwen, GLM and MiniMax."""
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
            f"the checkpoint is quantized with mxfp8 and its experts with {algorithm}, which is not supported; use one "
            "with mxfp8 everywhere."
        )
    return floats.mxfp8("mxfp8", spellings={"weight_scale_inv": "weight_scale"})


def _gptq_rule(config: Config, names: Names) -> Config | None:
    """Return the rule of GPTQModel's ``dynamic``.

    The first matching expression decides; "-:" marks what is not quantized.
    """
    plain = {key: value for key, value in config.items() if key != "dynamic"}
    for pattern, rule in (config.get("dynamic") or {}).items():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), names):
            return None if pattern.startswith("-:") else plain | rule
    return plain


def _compressed_tensors_rule(config: Config, names: Names) -> Config | None:
    """Return the group whose targets name the matrix.

    If there is none, it is the group of all linear layers.
    """
    groups = list((config.get("config_groups") or {}).values())
    targets = [(target, group) for group in groups for target in group.get("targets") or ()]
    named = (group for target, group in targets if _is_target(target, names))
    linear = (group for target, group in targets if target == "Linear")
    group = next(named, None) or next(linear, None)
    if group is None:
        if not _are_experts(names):
            return None
        if any(other.get("weights") != groups[0].get("weights") for other in groups):
            raise _unreadable("several groups, none of which names the experts", "one that does")
        group = groups[0] if groups else {}
    if (fmt := group.get("format") or config.get("format")) is None:
        raise _unreadable("an unnamed format", "one that it names")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unreadable(f"the sparse format {sparsity}", "dense ones")
    return {"format": fmt, "group": {key: value for key, value in group.items() if key != "targets"}}


def _is_target(target: str, names: Names) -> bool:
    """Return whether a target names a matrix.

    A target is the name of modules, or "re:" and an expression.
    """
    return matches(target[len("re:") :], names) if target.startswith("re:") else target in names


def _compressed_tensors(rule: Config) -> Reader:
    group, fmt = rule["group"], str(rule["format"])
    weights = group.get("weights") or {}
    if (book := _FLOAT_FORMATS.get(fmt)) is None:
        activations = bool(group.get("input_activations"))
        if fmt == _INT_QUANTIZED or (fmt == _NAIVE_QUANTIZED and weights.get("type", "int") == "int"):
            return replace(integers.int_quantized(weights, _unreadable), activations=activations)
        if fmt != _PACK_QUANTIZED:
            names = (_PACK_QUANTIZED, _INT_QUANTIZED, *_FLOAT_FORMATS)
            raise _unreadable(f"the format {fmt}", " or ".join(f'"{name}"' for name in names))
        return replace(integers.pack_quantized(weights, _unreadable), activations=activations)
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


def _unreadable(found: str, readable: str) -> CheckpointError:
    advice = "use such a one, or serve it without --quantization dymoe"
    return unreadable(f"compressed-tensors, {found}", readable, advice)


def _modelopt_rule(config: Config, names: Names) -> Config | None:
    """Return the rule of ModelOpt's MIXED_PRECISION.

    The configuration names layers, or modules that contain them, one by one.
    """
    described = describe_modelopt(config)
    if str(described.get("quant_algo")).upper() != "MIXED_PRECISION":
        return {key: described.get(key) for key in ("quant_algo", "group_size")}
    layers: Config = described.get("quantized_layers") or {}
    for name in names:
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            if (layer := layers.get(".".join(parts[:length]))) is not None:
                return dict(layer)
    experts = {name[: name.index(".experts.") + len(".experts.")] for name in names if ".experts." in name}
    return next((dict(layer) for key, layer in layers.items() if any(map(key.startswith, experts))), None)


def _modelopt(rule: Config) -> Reader:
    algorithm = str(rule.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise unreadable(f"modelopt, algorithm {algorithm}", ", ".join(_MODELOPT))
    reader = _MODELOPT[algorithm]("modelopt")
    if reader.encoding is NVFP4 and rule.get("group_size") not in (None, reader.group_size):
        raise CheckpointError(
            f"the checkpoint is quantized with modelopt in groups of {rule['group_size']}, but {algorithm} has "
            f"groups of {reader.group_size}; correct its quantization_config, or use another checkpoint."
        )
    return reader


def _quark_rule(config: Config, names: Names) -> Config | None:
    """Return the first pattern of ``layer_quant_config`` that matches.

    If none does, it is ``global_quant_config``.
    """
    rules: Config = config.get("layer_quant_config") or {}
    rule = next((rule for pattern, rule in rules.items() if any(fnmatchcase(name, pattern) for name in names)), None)
    weights = ((config.get("global_quant_config") if rule is None else rule) or {}).get("weight") or {}
    if isinstance(weights, list) and len(weights) == 1:
        weights = weights[0]
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            "the checkpoint is quantized with quark, its experts in several steps, which is not supported; use one "
            "whose experts are quantized once."
        )
    return weights if weights or _are_experts(names) else None


def _quark(weights: Config) -> Reader:
    """Return the reader for AMD Quark, whose layout is compressed-tensors'.

    See vLLM, quantization/quark/quark_moe.py.
    """
    kind, scheme, groups = weights.get("dtype"), weights.get("qscheme"), weights.get("group_size")
    if (kind, scheme, groups, weights.get("scale_format")) == ("fp4", "per_group", 32, "e8m0"):
        return floats.mxfp4("quark", spellings={"scale": "weight_scale"})
    if kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return floats.fp8("quark", spellings={"scale": "weight_scale"})
    raise unreadable(f"quark, experts in {kind} {scheme}", "MXFP4 and fp8_e4m3 by tensor or channel")


def _auto_round_rule(config: Config, names: Names) -> Config | None:
    """Return the rule of AutoRound's ``extra_config``, merged into the defaults.

    Its keys are modules or expressions.
    """
    plain = {key: value for key, value in config.items() if key != "extra_config"}
    rules: Config = config.get("extra_config") or {}
    rule: Config = {}
    for key in rules:
        if any(name == key or name.endswith(f".{key}") for name in names):
            rule = rules[key]
            break
    else:
        special = (key for key in rules if set(key) & _OF_EXPRESSIONS)
        rule = next((rules[key] for key in special if matches(key, names, anywhere=True)), rule)
    said = plain | {key: rule[key] for key in ("bits", "group_size", "sym") if key in rule}
    return None if (said.get("bits") or 0) >= 16 else said


def _auto_round(config: Config) -> Reader:
    """Return the reader for AutoRound (auto_round/export).

    AutoRound wraps the layouts of AutoGPTQ, AutoAWQ, FP8 blocks and MXFP.
    """
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
        reader = _compressed_tensors({"format": layout, "group": {"weights": weights}})
    else:
        raise CheckpointError(
            f'the checkpoint is quantized with auto-round, {kind} at {bits} bits in "{layout}", which is not '
            "supported; export it with --format auto_gptq, auto_awq, or with 16-bit weights."
        )
    return replace(reader, method="auto-round")


def _same_everywhere(config: Config, names: Names) -> Config:
    return config


_METHODS: dict[str, tuple[Callable[[Config, Names], Config | None], Callable[[Config], Reader]]] = {
    "awq": (_same_everywhere, integers.awq),
    "gptq": (_gptq_rule, integers.gptq),
    "auto-round": (_auto_round_rule, _auto_round),
    "compressed-tensors": (_compressed_tensors_rule, _compressed_tensors),
    "fp8": (_same_everywhere, _fp8),
    "mxfp4": (_same_everywhere, lambda config: floats.gpt_oss()),
    "mxfp8": (_same_everywhere, _mxfp8),
    "modelopt": (_modelopt_rule, _modelopt),
    "quark": (_quark_rule, _quark),
}

METHODS = tuple(_METHODS)

_NAMES_OF_VLLM = {
    "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "inc": "auto-round",
}
