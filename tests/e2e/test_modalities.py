"""Ernie-4.5-VL: each layer has experts for text, and experts for pictures."""

import itertools
import json
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope import Ernie4_5_VLRotaryEmbedding

from tests.e2e.architectures import COMMON, fill
from tests.e2e.engines import (
    answers_at_budgets,
    check_first_logprobs_close,
    check_logprobs_close,
    server_of,
    small_engine,
)
from tests.e2e.test_models import BOTH, BUDGETS, answers, check_converted

pytestmark = pytest.mark.engine

HIDDEN, DENSE, LAYERS, EXPERTS, WIDTHS = 128, 192, 3, 8, (96, 32)
TEXT_ONLY = {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 0, "video": 0}}
CONFIG = COMMON | {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "model_type": "ernie4_5_moe_vl",
    "auto_map": {"AutoConfig": "configuration.Config"},
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "num_hidden_layers": LAYERS,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "freq_allocation": 4,
    "moe_num_experts": [EXPERTS, EXPERTS],
    "moe_intermediate_size": list(WIDTHS),
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [LAYERS - 1, LAYERS - 1],
    "im_patch_id": 510,
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "embed_dim": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "hidden_act": "quick_gelu",
    },
    "pixel_hidden_size": 64,
    "use_temporal_conv": True,
    "temporal_conv_size": 2,
    "spatial_conv_size": 2,
}
CODE = """
from transformers import PreTrainedConfig

class Config(PreTrainedConfig):
    model_type = "ernie4_5_moe_vl"

    def __init__(self, vision_config=None, **others):
        self.vision_config = PreTrainedConfig(**(vision_config or {}))
        super().__init__(**others)
"""
"""Published checkpoints bring their configuration's class, too; transformers' own has other fields."""


def mlp(place, width):
    shapes = (("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width)))
    return {f"{place}.{word}.weight": torch.empty(shape) for word, shape in shapes}


def save(folder):
    """Write a random checkpoint of the language model.

    Its tensor names and the layout of its routers are those of published checkpoints.
    """
    tensors = {"model.embed_tokens.weight": torch.empty(512, HIDDEN), "lm_head.weight": torch.empty(512, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        for word, shape in (("q", (128, HIDDEN)), ("k", (64, HIDDEN)), ("v", (64, HIDDEN)), ("o", (HIDDEN, 128))):
            tensors[f"{at}.self_attn.{word}_proj.weight"] = torch.empty(shape)
        if layer == 0:
            tensors |= mlp(f"{at}.mlp", DENSE)
            continue
        tensors |= mlp(f"{at}.mlp.shared_experts", WIDTHS[0])
        for modality, expert in itertools.product(range(2), range(EXPERTS)):
            tensors |= mlp(f"{at}.mlp.experts.{modality * EXPERTS + expert}", WIDTHS[modality])
        for name in ("weight", "weight_1"):
            tensors[f"{at}.mlp.gate.{name}"] = torch.empty(HIDDEN, EXPERTS)
        tensors[f"{at}.mlp.moe_statics.e_score_correction_bias"] = torch.zeros(2, EXPERTS)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if "embed" in name:
            tensor.normal_()
        elif "moe_statics" not in name:
            fill(name, tensor)
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    folder.mkdir()
    made = {name: x if "statics" in name or ".gate.weight" in name else x.bfloat16() for name, x in tensors.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    (folder / "configuration.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_both_kinds_of_experts_are_served_and_quantized(tmp_path):
    """Experts for text answer, and experts for pictures have the bytes of `quantize`.

    Only prompts of text are asked.
    """
    folder, original = save(tmp_path / "model"), Ernie4_5_VLRotaryEmbedding.forward_native

    def forward(self, positions, query, key=None, *rest):  # vLLM 0.32 passes more arguments than it takes on a CPU
        return original(self, positions, query, key)

    with mock.patch.object(Ernie4_5_VLRotaryEmbedding, "forward_native", forward):
        with small_engine(folder, **TEXT_ONLY) as llm:
            theirs = answers(llm)
        with small_engine(folder, BOTH, **TEXT_ONLY) as llm:
            assert server_of(llm).experts.layers == (1, 4, 2, 5)
            check_converted(llm, folder)
            ours = answers_at_budgets(llm, BUDGETS, lambda: answers(llm))
        with small_engine(tmp_path / "converted", {"expert_budget": "50%"}, **TEXT_ONLY) as llm:
            again = answers(llm)
    check_logprobs_close(ours, theirs)
    check_first_logprobs_close(ours, theirs)
    assert [a.tokens for a in again] == [a.tokens for a in ours]
