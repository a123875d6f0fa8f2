"""The plugin's quantization configuration passes as the checkpoint's own.

vLLM's models check its name and class.
"""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch
import vllm
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from tests.quantize.readers.test_configurations import (
    AWQ,
    BLOCKS,
    GPTQ,
    GROUP4,
    QUARK4,
    ROUND,
    modelopt,
    pack_quantized,
)
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig, _name_in_vllm

EXCLUDED = {"ignore": ["lm_head"], "exclude_modules": [], "kv_cache_quant_algo": None}
MIXED = {"quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}}
QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "global_quant_config": {"weight": QUARK4, "input_tensors": None, "output_tensors": None, "bias": None},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": [],
}
CHECKPOINTS = {
    "awq": AWQ,
    "gptq": GPTQ | {"sym": True, "desc_act": False},
    "auto-round": ROUND,
    "compressed-tensors": pack_quantized(GROUP4) | {"ignore": []},
    "fp8": BLOCKS,
    "deepseek_v4": BLOCKS | {"expert_dtype": "fp4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "modelopt": modelopt("FP8", **EXCLUDED),
    "modelopt_fp4": modelopt("NVFP4", group_size=16, **EXCLUDED),
    "modelopt_mixed": modelopt("MIXED_PRECISION", **MIXED, **EXCLUDED),
    "modelopt_mxfp8": modelopt("MXFP8", **EXCLUDED),
    "quark": QUARK,
}
# Classes of methods whose experts the plugin cannot read.
OTHERS = {
    "OnlineQuantizationConfig", "TorchAOConfig", "BitsAndBytesConfig", "GGUFConfig", "MoeWNA16Config", "HummingConfig",
    "QuantizationArgs", "QuantizationConfig", "QuantizationConfigArgs", "dict", "list", "FPQuantConfig",
}  # fmt: skip
OTHER_NAMES = {"bitsandbytes", "torchao", "gguf", "online"}


@pytest.fixture(params=CHECKPOINTS.values(), ids=CHECKPOINTS, name="both")
def _both(request):
    """Return the plugin's configuration and vLLM's, for the same checkpoint."""
    said = request.param
    return DymoeConfig.from_config(dict(said)), get_quantization_config(_name_in_vllm(said)).from_config(dict(said))


def test_name_class_and_fields_are_the_checkpoints(both):
    ours, theirs = both
    assert ours.get_name() == theirs.get_name()
    assert isinstance(ours, DymoeConfig)
    assert isinstance(ours, type(theirs))
    for name, value in vars(theirs).items():
        if isinstance(value, str | int | list | dict | type(None)) and not name.startswith("_"):
            assert getattr(ours, name) == value, name
    assert not hasattr(ours, "anything_else")


def test_what_a_model_changes_is_what_the_dense_layers_follow(both):
    """Bailing-V3 and Voxtral change such fields, and workers receive the change."""
    ours, theirs = both
    field = next((name for name, value in vars(theirs).items() if isinstance(value, list | str)), None)
    if field is not None:
        setattr(ours, field, ["changed"])
        assert getattr(ours._dense, field) == ["changed"]
    for sent in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(sent) is type(ours)
        assert field is None or getattr(sent, field) == getattr(sent._dense, field) == ["changed"]


def test_a_checkpoint_without_quantization_is_ours_alone():
    config = DymoeConfig()
    assert (config.get_name(), type(config)) == ("dymoe", DymoeConfig)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj"]}
    assert config.packed_modules_mapping == {"qkv_proj": ["q_proj"]}
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16, torch.float32]


def of_quantization(node):
    """Return whether an expression is a quantization configuration."""
    return ast.unparse(node).rpartition(".")[2] in ("quant_config", "quantization_config")


def asked():
    """Return what vLLM's models and layers compare a quantization config with.

    These are classes and names.
    """
    classes, names = {}, {}
    root = Path(vllm.__file__).parent
    for folder in ("models", "model_executor", "v1", "lora"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            if "quant_config" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func) == "isinstance"
                    and of_quantization(node.args[0])
                ):
                    kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
                    for kind in kinds:
                        classes.setdefault(ast.unparse(kind).rpartition(".")[2], path)
                if isinstance(node, ast.Compare) and "quant_config.get_name()" in ast.unparse(node.left):
                    for text_node in ast.walk(node.comparators[0]):
                        if isinstance(text_node, ast.Constant):
                            names.setdefault(text_node.value, path)
    return classes, names


def test_every_class_and_name_that_vllm_asks_for_is_answered():
    classes, names = asked()
    made = [DymoeConfig.from_config(dict(said)) for said in CHECKPOINTS.values()]
    answered = {base.__name__ for config in made for base in type(config).__mro__}
    assert {"Fp8Config", "AutoAWQConfig", "CompressedTensorsConfig"} <= classes.keys(), "the search finds nothing"
    assert "modelopt_fp4" in names
    assert not classes.keys() - answered - OTHERS, {name: classes[name] for name in classes.keys() - answered - OTHERS}
    assert not names.keys() - {config.get_name() for config in made} - OTHER_NAMES
    assert all(isinstance(config, QuantizationConfig) for config in made)
