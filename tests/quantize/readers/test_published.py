"""Configurations as published checkpoints have them: which numbers of the experts each of them means."""

import json
import pickle

import pytest

from tests.quantize.readers.float_packing import FP8_WEIGHTS, NVFP4_WEIGHTS, compressed
from vllm_dymoe.quantize.model_config import ModelConfig
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.residency.code import FP8, MXFP4, NVFP4, STEPS
from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PLAIN_NVFP4, PLAIN_FP8 = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}


def mixed(**layers):
    """ModelOpt's MIXED_PRECISION; underscores stand for dots."""
    named = {name.replace("__", "."): layer for name, layer in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}


def groups(*named):
    """compressed-tensors with a group for each (targets, format, weights)."""
    made = [
        {"targets": targets, "format": fmt, "weights": {"type": "float", **weights}} for targets, fmt, weights in named
    ]
    config = dict(enumerate(made))
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": config, "ignore": []}


DENSE = (["Linear"], "float-quantized", FP8_WEIGHTS)
EXPERTS = (["re:.*mlp\\.experts\\..*"], "nvfp4-pack-quantized", NVFP4_WEIGHTS)
CONFIGS = {
    "MiniMax-M2": (
        BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        FP8,
        128,
    ),
    "MiniMax-M3": ({"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}, FP8, 32),
    "DeepSeek-V3": (BLOCKS | {"fmt": "e4m3"}, FP8, 128),
    "gpt-oss": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, MXFP4, 32),
    "ModelOpt, config.json": ({"quant_method": "modelopt", **PLAIN_NVFP4, "ignore": ["lm_head"]}, NVFP4, 16),
    "ModelOpt, hf_quant_config.json": ({"producer": {"name": "modelopt"}, "quantization": PLAIN_NVFP4}, NVFP4, 16),
    "ModelOpt, as vLLM names it": ({"quant_method": "modelopt_fp4", "quantization": PLAIN_NVFP4}, NVFP4, 16),
    "ModelOpt, blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, FP8, 128),
    "Qwen3.6 of NVIDIA": (
        mixed(
            model__layers__0__mlp__experts=PLAIN_NVFP4,
            model__layers__0__mlp__shared_expert__up_proj=PLAIN_FP8,
            mtp__layers__0__mlp__experts=PLAIN_FP8,
        ),
        NVFP4,
        16,
    ),
    "dense layers in FP8, experts in NVFP4": (groups(DENSE, EXPERTS), NVFP4, 16),
    "experts named one by one": (groups(DENSE, (["model.layers.3.mlp.experts.7.w1"], *EXPERTS[1:])), NVFP4, 16),
    "experts with the rest": (groups(DENSE, (["re:.*self_attn.*"], *EXPERTS[1:])), FP8, None),
    "an expression that is none": (groups(DENSE, (["re:*"], *EXPERTS[1:])), FP8, None),
    "compressed-tensors MXFP8": (
        compressed("mxfp8-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
        FP8,
        32,
    ),
}


@pytest.mark.parametrize(("config", "codebook", "group_size"), CONFIGS.values(), ids=CONFIGS)
def test_the_numbers_of_experts(config, codebook, group_size):
    reader = make_reader(config)
    assert (reader.code, reader.group_size) == (codebook or STEPS[4], group_size)
    sent = pickle.loads(pickle.dumps(reader))  # as vLLM does for every worker process
    assert (sent.code, sent.parts, sent.held) == (reader.code, reader.parts, True)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (groups(EXPERTS, (["re:.*layers.0.*"], *DENSE[1:])), "the format float-quantized and nvfp4-pack-quantized"),
        (groups(EXPERTS, (EXPERTS[0], EXPERTS[1], NVFP4_WEIGHTS | {"dynamic": True})), "several kinds of weights"),
        (
            mixed(model__layers__0__mlp__experts=PLAIN_NVFP4, model__layers__1__mlp__experts=PLAIN_FP8),
            "its experts by FP8 and NVFP4",
        ),
        (mixed(model__layers__0__self_attn__q_proj=PLAIN_FP8), "its experts not at all"),
    ],
)
def test_experts_of_several_formats_are_refused(config, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        make_reader(config)


@pytest.mark.parametrize(
    ("says", "codebook", "parts"),
    [
        ({}, MXFP4, ("weight", "weight_scale")),
        ({"expert_dtype": "fp4"}, MXFP4, ("weight", "weight_scale")),
        ({"expert_dtype": "fp8"}, FP8, ("weight", "weight_scale_inv")),
    ],
)
def test_deepseek_v4_says_beside_its_quantization_what_its_experts_are(tmp_path, says, codebook, parts):
    model = {"model_type": "deepseek_v4", "quantization_config": dict(BLOCKS), **says}
    (tmp_path / "config.json").write_text(json.dumps(model))
    reader = make_reader(ModelConfig(tmp_path).quantization)
    assert (reader.code, reader.parts) == (codebook, parts)
    assert reader.spellings["scale"] == parts[1]
    # vLLM asks with the model's configuration, and then makes ours of the quantization alone.
    served = type("Config", (), {"model_type": "deepseek_v4", **says})()
    assert DymoeConfig.override_quantization_method(model["quantization_config"], "dymoe", served) == "dymoe"
    config = DymoeConfig.from_config(model["quantization_config"])
    assert (config.reader.code, config._dense.get_name()) == (codebook, "deepseek_v4_fp8")


def test_experts_of_deepseek_v4_that_nvidia_has_quantized():
    assert make_reader(BLOCKS | {"expert_dtype": "fp4", "moe_quant_algo": "NVFP4"}).code is NVFP4


def test_an_older_checkpoint_of_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert ModelConfig(tmp_path).quantization is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(CONFIGS["ModelOpt, hf_quant_config.json"][0]))
    assert make_reader(ModelConfig(tmp_path).quantization).code is NVFP4


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CONFIGS["ModelOpt, config.json"][0], "modelopt_fp4"),
        (CONFIGS["ModelOpt, hf_quant_config.json"][0] | {"quant_method": "modelopt_fp4"}, "modelopt_fp4"),
        (CONFIGS["ModelOpt, blocks"][0], "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt_mxfp8"),
        (CONFIGS["Qwen3.6 of NVIDIA"][0], "modelopt_mixed"),
        (CONFIGS["MiniMax-M2"][0], "fp8"),
        (CONFIGS["MiniMax-M3"][0], "modelopt_mxfp8"),
    ],
)
def test_dense_layers_are_what_vllm_makes_of_the_same_checkpoint(config, name):
    legacy = "quantization" in config
    if legacy:
        config = config | {
            "quantization": config["quantization"] | {"kv_cache_quant_algo": None, "exclude_modules": []}
        }
    assert DymoeConfig.from_config(dict(config))._dense.get_name() == name
