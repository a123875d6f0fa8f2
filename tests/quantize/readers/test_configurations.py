"""A quantization_config names the encoding of experts, or is refused."""

import json
import pickle

import pytest
import torch

from tests.quantize.readers.kinds import FP8_WEIGHTS, NVFP4_WEIGHTS, compressed, float_parts, random_floats
from vllm_dymoe.experts.encoding import FP8, MXFP4, NVFP4, STEPS
from vllm_dymoe.quantize.model_config import ModelConfig
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
GROUP4 = {"num_bits": 4, "group_size": 64, "strategy": "group", "symmetric": True}
CHANNEL8 = {"num_bits": 8, "strategy": "channel", "symmetric": True}
QUARK4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
QUARK8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
PLAIN_NVFP4, PLAIN_FP8 = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}


def pack_quantized(weights, **changes):
    """Return a compressed-tensors config of packed integers."""
    return compressed("pack-quantized", {"type": "int"} | weights, **({"input_activations": None} | changes))


def quark(weight, **layers):
    rules = {pattern: {"weight": rule} for pattern, rule in layers.items()}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "layer_quant_config": rules}


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def mixed(**layers):
    """Return a MIXED_PRECISION config of ModelOpt; ``__`` in a name stands for a dot."""
    named = {name.replace("__", "."): layer for name, layer in layers.items()}
    return modelopt("MIXED_PRECISION", quantized_layers=named)


def groups(*named):
    """Return a compressed-tensors config of (targets, format, weights) groups."""
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
    "ModelOpt, blocks": (modelopt("FP8_PB_WO"), FP8, 128),
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
    assert (reader.encoding, reader.group_size) == (codebook or STEPS[4], group_size)
    sent = pickle.loads(pickle.dumps(reader))  # as vLLM does for every worker process
    assert (sent.encoding, sent.parts, sent.held) == (reader.encoding, reader.parts, True)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "hqq"}, "with hqq already"),
        (AWQ | {"version": "gemv"}, 'version "gemv"'),
        (AWQ | {"bits": 3}, "at 3 bits, but only 4"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (AWQ | {"group_size": 48}, "in groups of 48"),
        (GPTQ | {"bits": 3}, "at 3 bits, but only 8, 4, 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format "marlin"'),
        (ROUND | {"packing_format": "auto_round:new"}, '"auto_round:new"'),
        (pack_quantized(GROUP4 | {"num_bits": 6}), "at 6 bits, but only 8, 4, 2"),
        (pack_quantized(GROUP4 | {"type": "float"}), 'float weights by "group"'),
        (pack_quantized(GROUP4 | {"strategy": "tensor"}), 'int weights by "tensor"'),
        (pack_quantized(GROUP4, format="int-quantized"), "at 4 bits, but only 8"),
        (groups(([], "pack-quantized", GROUP4), ([], "pack-quantized", CHANNEL8)), "none of which names the experts"),
        (compressed("nvfp4-pack-quantized", FP8_WEIGHTS), '"channel" in nvfp4-pack-quantized'),
        (compressed("float-quantized", FP8_WEIGHTS | {"symmetric": False}), "only symmetric 8-bit floats"),
        (compressed("float-quantized", FP8_WEIGHTS, format="mixed"), "the format mixed"),
        (BLOCKS | {"fmt": "e5m2"}, "fp8, e5m2, but only e4m3"),
        (BLOCKS | {"weight_block_size": [128, 100]}, "in groups of 100"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, "its experts with NVFP4"),
        (modelopt("W4A8_AWQ"), "algorithm W4A8_AWQ"),
        (modelopt(None), "algorithm NONE"),
        (modelopt("NVFP4", group_size=32), "NVFP4 has groups of 16"),
        (quark({"dtype": "int4", "qscheme": "per_group"}), "int4 per_group"),
        (quark(QUARK4 | {"group_size": 16}), "fp4 per_group"),
        (quark([QUARK4, QUARK8]), "quark, its experts in several steps"),
    ],
)
def test_what_is_not_read_is_refused(config, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        make_reader(config)
    assert str(caught.value).endswith(".")


def test_layers_that_are_left_out_or_no_experts_are_no_other_format():
    assert make_reader(GPTQ | {"dynamic": {r"-:.*attn.*": {}}}).bits == 4
    assert make_reader(ROUND | {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16}}}).bits == 4


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mxfp4-compressed-tensors", quark(QUARK4)),
        ("fp8-compressed-tensors", quark(QUARK8)),
        ("fp8-compressed-tensors", quark(QUARK4, **{"*.experts.*": QUARK8})),
        ("mxfp4-compressed-tensors", quark([QUARK4], **{"*self_attn*": QUARK8})),
        ("fp8-blocks", ROUND | {"bits": 8, "group_size": [128, 128], "data_type": "fp"}),
        ("mxfp4-compressed-tensors", ROUND | {"data_type": "mx_fp"}),
        ("mxfp8-compressed-tensors", ROUND | {"bits": 8, "data_type": "mx_fp"}),
    ],
)
def test_quark_and_auto_round_have_other_words_for_the_same(kind, config):
    matrix, reader = random_floats(kind, 64, 128), make_reader(config)
    given = dict(zip(reader.parts, float_parts(kind, matrix).values(), strict=True))
    assert torch.equal(reader.read(given, 64, 128).dequantize(), matrix.dequantize())


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
    assert (reader.encoding, reader.parts) == (codebook, parts)
    assert reader.spellings["scale"] == parts[1]
    # vLLM asks with the model's configuration, and then creates the plugin's from the quantization alone.
    served = type("Config", (), {"model_type": "deepseek_v4", **says})()
    assert DymoeConfig.override_quantization_method(model["quantization_config"], "dymoe", served) == "dymoe"
    config = DymoeConfig.from_config(model["quantization_config"])
    assert (config.reader.encoding, config._dense.get_name()) == (codebook, "deepseek_v4_fp8")


def test_experts_of_deepseek_v4_that_nvidia_has_quantized():
    assert make_reader(BLOCKS | {"expert_dtype": "fp4", "moe_quant_algo": "NVFP4"}).encoding is NVFP4


def test_an_older_checkpoint_of_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert ModelConfig(tmp_path).quantization is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(CONFIGS["ModelOpt, hf_quant_config.json"][0]))
    assert make_reader(ModelConfig(tmp_path).quantization).encoding is NVFP4


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CONFIGS["ModelOpt, config.json"][0], "modelopt_fp4"),
        (CONFIGS["ModelOpt, hf_quant_config.json"][0] | {"quant_method": "modelopt_fp4"}, "modelopt_fp4"),
        (CONFIGS["ModelOpt, blocks"][0], "modelopt"),
        (modelopt("MXFP8"), "modelopt_mxfp8"),
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
