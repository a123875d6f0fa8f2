"""``quantize``, ``inspect`` and ``plan`` with the tensor names and nested configurations of supported families."""

import json

import pytest
import torch

from tests.cli.checkpoints import EXPERTS, INTERMEDIATE, MOE_LAYERS, TOP_K, command, make_model, quantized, sections
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.tensors import CheckpointError, read_tensors

# Settings that ``plan`` needs in addition to those for packing.
PLANNED = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "first_k_dense_replace": 1}


def renamed(model, old, new):
    model.tensors = {name.replace(old, new): tensor for name, tensor in model.tensors.items()}


def nested(model, *keys):
    for key in reversed(keys):
        model.config = {"model_type": "outer", "architectures": ["Outer"], "vision_config": {}, key: model.config}


def copied(model, old, new):
    model.tensors |= {
        name.replace(old, new): tensor.clone() + 1 for name, tensor in model.tensors.items() if name.startswith(old)
    }


def qwen3_next(model):
    copied(model, "model.layers.2.", "mtp.layers.0.")
    model.tensors["mtp.fc.weight"] = torch.ones(2, 2)


def glm_4_moe(model):
    """A draft's layer comes after the model's last one."""
    copied(model, "model.layers.2.", "model.layers.3.")


def qwen3_vl_moe(model):
    renamed(model, "model.layers", "model.language_model.layers")
    model.config["model_type"] = "qwen3_vl_moe_text"
    model.tensors["model.visual.blocks.0.weight"] = torch.ones(2)
    nested(model, "text_config")


def qwen3_omni(model):
    copied(model, "model.", "talker.model.")
    renamed(model, "model.layers", "thinker.model.layers")
    renamed(model, "talker.thinker.", "talker.")
    nested(model, "thinker_config", "text_config")


def kimi_linear(model):
    renamed(model, ".mlp.", ".block_sparse_moe.")
    model.config["num_experts_per_token"] = model.config.pop("num_experts_per_tok")


FAMILIES = {
    "qwen3-next": ("separate", qwen3_next),
    "qwen3.5": ("fused", qwen3_next),
    "glm-4-moe": ("separate", glm_4_moe),
    "qwen3-vl-moe": ("llama-4", qwen3_vl_moe),
    "qwen3-vl-moe, other stacks": ("fused", qwen3_vl_moe),
    "qwen3-omni": ("separate", qwen3_omni),
    "kimi-linear": ("mixtral", kimi_linear),
    "internvl": ("separate", lambda model: nested(model, "llm_config")),
}


@pytest.mark.parametrize(("style", "change"), FAMILIES.values(), ids=FAMILIES)
def test_a_family_is_quantized_inspected_and_planned(tmp_path, style, change):
    model, out = make_model(tmp_path / "model", style), tmp_path / "out"
    model.config |= PLANNED
    model.config["model_type"] = "any"
    change(model)
    model.save()
    found = json.loads(command("inspect", model.folder, "--json").stdout)
    assert (found["layers"], found["num_experts"], found["top_k"]) == (list(MOE_LAYERS), EXPERTS, TOP_K)
    shape = read_shape(str(model.folder))
    assert (shape.moe_layers, shape.experts, shape.top_k) == (len(MOE_LAYERS), EXPERTS, TOP_K)
    assert shape.intermediate == INTERMEDIATE
    quantized(model, out, "--high", 16)
    assert FileStore(out).experts.layers == MOE_LAYERS
    for place, matrix, section in sections(out, 16):
        assert torch.equal(matrix.view(section.clone()).weight, model.experts[place]), place
    # Everything that is not packed is kept: a draft's experts, and those of another model.
    packed = {place.name for tensors in Checkpoint.open(model.folder).experts for place in tensors.parts.values()}
    assert len(packed) == (2 * len(MOE_LAYERS) if style in ("fused", "llama-4") else 3 * EXPERTS * len(MOE_LAYERS))
    assert read_tensors(out).keys() - {n for n in read_tensors(out) if n.startswith("dymoe")} >= (
        model.tensors.keys() - packed
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.tensors.keys() - packed


def test_experts_of_two_modalities_are_planned_and_refused_by_quantize(tmp_path):
    """Ernie-4.5-VL's configuration lists one number for text and one for images."""
    model = make_model(tmp_path / "model")
    model.config |= PLANNED | {"moe_num_experts": [EXPERTS, EXPERTS], "moe_intermediate_size": [INTERMEDIATE, 32]}
    model.config["moe_layer_start_index"] = [1, 1]
    del model.config["num_experts"], model.config["first_k_dense_replace"]
    model.save()
    shape = read_shape(str(model.folder))
    assert (shape.moe_layers, shape.experts, shape.intermediate) == (len(MOE_LAYERS), EXPERTS, INTERMEDIATE)
    with pytest.raises(CheckpointError, match="modalities"):
        Checkpoint.open(model.folder).model_experts((16,), 64, torch.bfloat16)


def test_a_folder_without_sizes_is_no_model_to_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"thinker_config": {"text_config": {"hidden_size": 8}}}))
    with pytest.raises(ConfigError, match="Mixture-of-Experts"):
        read_shape(str(tmp_path))
