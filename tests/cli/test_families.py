"""``quantize``, ``inspect`` and ``plan`` for every supported family of models.

They differ in tensor names and nested configurations.
"""

import itertools
import json

import pytest
import torch

from tests.cli.checkpoints import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MOE_LAYERS,
    NAMES,
    TOP_K,
    command,
    make_model,
    quantized,
    refused,
    sections,
)
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.tensors import read_tensors

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
    """The layer of a draft follows the model's last one."""
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
    # Tensors that are not packed stay in the checkpoint, such as the experts of a draft or of another model.
    packed = {place.name for tensors in Checkpoint.open(model.folder).experts for place in tensors.parts.values()}
    assert len(packed) == (2 * len(MOE_LAYERS) if style in ("fused", "llama-4") else 3 * EXPERTS * len(MOE_LAYERS))
    assert read_tensors(out).keys() - {n for n in read_tensors(out) if n.startswith("dymoe")} >= (
        model.tensors.keys() - packed
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.tensors.keys() - packed


def with_pictures(folder, experts, width):
    """Write Ernie-4.5-VL: experts for text, then experts for pictures.

    Experts for pictures are more or fewer, and have another width. Their numbers continue those of text.
    """
    model = make_model(folder)
    model.config |= PLANNED | {"moe_num_experts": [EXPERTS, experts], "moe_intermediate_size": [INTERMEDIATE, width]}
    model.config |= {"moe_layer_start_index": [1, 1], "moe_k": TOP_K}
    del model.config["num_experts"], model.config["first_k_dense_replace"]
    generator, pictures = torch.Generator().manual_seed(2), {}
    for position, layer in enumerate(MOE_LAYERS):
        for expert, (projection, word) in itertools.product(range(experts), enumerate(NAMES["separate"])):
            rows, columns = (HIDDEN, width) if projection == Projection.DOWN else (width, HIDDEN)
            weight = torch.randn(rows, columns, generator=generator).bfloat16()
            model.tensors[f"model.layers.{layer}.mlp.experts.{EXPERTS + expert}.{word}.weight"] = weight
            pictures[position, expert, projection] = weight
    model.save()
    return model, pictures


def test_experts_of_two_modalities_are_quantized_inspected_and_planned(tmp_path):
    """Layers of the second modality are numbered after all others.

    In the stored order, each follows the text layer that it belongs to, as vLLM creates them.
    """
    most, width, (first, second) = EXPERTS + 2, 32, MOE_LAYERS
    model, pictures = with_pictures(tmp_path / "model", most, width)
    shape = read_shape(str(model.folder))
    assert (shape.moe_layers, shape.experts, shape.intermediate) == (len(MOE_LAYERS), EXPERTS + most, INTERMEDIATE)
    layers = [first, first + 3, second, second + 3]
    found = json.loads(command("inspect", model.folder, "--json").stdout)
    assert (found["layers"], found["num_experts"], found["top_k"]) == (layers, most, TOP_K)
    quantized(model, tmp_path / "out", "--high", 16)
    for (position, expert, projection), matrix, section in sections(tmp_path / "out", 16):
        mine, weight = model.experts if position % 2 == 0 else pictures, matrix.view(section.clone()).weight
        own = mine.get((position // 2, expert, projection), torch.empty(0, 0).bfloat16())
        assert torch.equal(weight[: own.shape[0], : own.shape[1]], own)
        assert weight.count_nonzero() == own.count_nonzero(), "the rest is zeros"
    assert FileStore(tmp_path / "out").experts.layers == tuple(layers)


def test_experts_of_two_modalities_may_lack_none(tmp_path):
    model, _ = with_pictures(tmp_path / "model", EXPERTS, 32)
    model.config["moe_num_experts"] = [EXPERTS, EXPERTS + 1]
    model.save()
    assert f"expert {EXPERTS} in layer {MOE_LAYERS[0] + 3}" in refused("quantize", model.folder, "-o", tmp_path / "out")


def test_a_folder_without_sizes_is_no_model_to_plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"thinker_config": {"text_config": {"hidden_size": 8}}}))
    with pytest.raises(ConfigError, match="Mixture-of-Experts"):
        read_shape(str(tmp_path))
