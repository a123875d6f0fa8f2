"""Small random checkpoints of models that transformers does not write.

Configuration and names of tensors are those of published checkpoints, as vLLM's models read them.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.renderers.inkling_encoding import SPECIAL_TOKEN_SPELLINGS

from tests.e2e.architectures import COMMON, fill
from tests.e2e.pictures import last_ids, make_tokenizer

_HIDDEN, _EXPERTS, _WIDTH, _DENSE = 128, 8, 96, 192
_CODE = """
from transformers import PreTrainedConfig

class Config(PreTrainedConfig):
    model_type = "{}"
"""
"""The configuration's class, which checkpoints bring themselves if neither vLLM nor transformers has it."""


@dataclass(frozen=True)
class Handmade:
    """A model by its config.json, and by the shapes of its tensors.

    A model that vLLM's CPU build ends before it runs needs no tensors: vLLM makes them up.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # special words of its tokenizer, if it needs one
    zero_norms: bool = False  # a norm multiplies by its weight and 1
    own_code: bool = False  # the checkpoint has its configuration's class

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that an engine needs for the model."""
        code = {"trust_remote_code": True} if self.own_code else {}
        words = {"skip_tokenizer_init": False} if self.words else {}
        return code | words | ({} if self.shapes else {"load_format": "dummy"})

    def save(self, folder: Path) -> Path:
        """Write a random bf16 checkpoint, with the same weights every time."""
        torch.manual_seed(0)
        tensors = {name: torch.empty(shape) for name, shape in self.shapes.items()}
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor.fill_(float(not self.zero_norms))
            elif "embed" in name:
                tensor.normal_()
            else:
                fill(name, tensor)
        folder.mkdir()
        own = {}
        if self.own_code:
            own = {"auto_map": {"AutoConfig": "configuration.Config"}}
            (folder / "configuration.py").write_text(_CODE.format(self.config["model_type"]))
        described = COMMON | {"dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 10000.0} | self.config | own
        (folder / "config.json").write_text(json.dumps(described))
        bf16 = {name: x if name.endswith("bias") else x.bfloat16() for name, x in tensors.items()}
        save_file(bf16, folder / "model.safetensors", {"format": "pt"})
        if self.words:
            make_tokenizer(last_ids(self.words), {}).save_pretrained(folder)
        return folder


def _mlp(at: str, width: int, *stack: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of gate, up and down projections, or of stacks of them."""
    up, down = (*stack, width, _HIDDEN), (*stack, _HIDDEN, width)
    return {f"{at}.gate_proj.weight": up, f"{at}.up_proj.weight": up, f"{at}.down_proj.weight": down}


def _model(layers: int, embeddings: str) -> dict[str, tuple[int, ...]]:
    norms = {
        f"model.layers.{layer}.{name}.weight": (_HIDDEN,)
        for layer in range(layers)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    vocabulary = COMMON["vocab_size"]
    ends = {f"model.{embeddings}.weight": (vocabulary, _HIDDEN), "lm_head.weight": (vocabulary, _HIDDEN)}
    return ends | norms | {"model.norm.weight": (_HIDDEN,)}


def _step35() -> Handmade:
    """Step-3.5; without its clamp, which experts of vLLM's CPU build do not have."""
    layers, size = 3, 32
    shapes = _model(layers, "embed_tokens")
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{word}_proj.weight": (2 * size, _HIDDEN) for word in "kv"}
        shapes |= {f"{at}.self_attn.{word}_proj.weight": (_HIDDEN, _HIDDEN) for word in "qo"}
        shapes |= {f"{at}.self_attn.{word}_norm.weight": (size,) for word in "qk"}
        if layer == 0:
            shapes |= _mlp(f"{at}.mlp", _DENSE)
            continue
        shapes |= _mlp(f"{at}.moe", _WIDTH, _EXPERTS) | _mlp(f"{at}.share_expert", 64)
        shapes |= {f"{at}.moe.gate.weight": (_EXPERTS, _HIDDEN), f"{at}.moe.router_bias": (_EXPERTS,)}
    config = {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_hidden_layers": layers,
        "num_attention_groups": 2,
        "head_dim": size,
        "intermediate_size": _DENSE,
        "use_moe": True,
        "moe_intermediate_size": _WIDTH,
        "moe_num_experts": _EXPERTS,
        "moe_top_k": 2,
        "share_expert_dim": 64,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 1.5,
        "layer_types": ["full_attention"] * layers,
    }
    return Handmade(config, shapes, zero_norms=True)


def _bailing_mlp(at: str, *, dense: bool) -> dict[str, tuple[int, ...]]:
    if dense:
        return _mlp(at, _DENSE)
    shapes = _mlp(f"{at}.shared_experts", 64)
    for expert in range(_EXPERTS):
        shapes |= _mlp(f"{at}.experts.{expert}", _WIDTH)
    return shapes | {f"{at}.gate.weight": (_EXPERTS, _HIDDEN), f"{at}.gate.expert_bias": (_EXPERTS,)}


_BAILING = {
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "intermediate_size": _DENSE,
    "moe_intermediate_size": _WIDTH,
    "moe_shared_expert_intermediate_size": 64,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "use_bias": False,
}


def _bailing_v2() -> Handmade:
    size = 32
    shapes = _model(2, "word_embeddings")
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.attention.query_key_value.weight": (8 * size, _HIDDEN),
            f"{at}.attention.query_layernorm.weight": (size,),
            f"{at}.attention.key_layernorm.weight": (size,),
            f"{at}.attention.dense.weight": (_HIDDEN, 4 * size),
        }
        shapes |= _bailing_mlp(f"{at}.mlp", dense=layer == 0)
    config = _BAILING | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "head_dim": size,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "use_qkv_bias": False,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "embedding_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return Handmade(config, shapes, own_code=True)


def _bailing_v3() -> Handmade:
    """Bailing-V3 without its linear attention, which vLLM runs on GPUs only."""
    layers, heads, rank, nope, rope = 2, 4, 512, 64, 64
    shapes = _model(layers, "word_embeddings")
    for layer in range(layers):
        at = f"model.layers.{layer}"
        attention = {
            "q_proj": (heads * (nope + rope), _HIDDEN),
            "kv_a_proj_with_mqa": (rank + rope, _HIDDEN),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * 2 * nope, rank),
            "dense": (_HIDDEN, heads * nope),
        }
        shapes |= {f"{at}.attention.{name}.weight": shape for name, shape in attention.items()}
        shapes |= _bailing_mlp(f"{at}.mlp", dense=layer == 0)
    config = _BAILING | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "layer_group_size": 1,
        "layer_types": ["full_attention"] * layers,
        "head_dim": nope,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": nope,
        "short_conv_kernel_size": 4,
    }
    return Handmade(config, shapes, own_code=True)


_INKLING = Handmade(
    {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_model",
        "head_dim": 32,
        "intermediate_size": _WIDTH,
        "dense_intermediate_size": _DENSE,
        "d_rel": 16,
        "rel_extent": 64,
        "local_layer_ids": [0],
        "sliding_window_size": 64,
        "use_embed_norm": True,
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "dense_mlp_idx": 1,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "route_scale": 1.5,
        "shared_expert_sink": True,
        "logits_mup_width_multiplier": 1.0,
    },
    words=tuple(spelling for spellings in SPECIAL_TOKEN_SPELLINGS.values() for spelling in spellings),
)
_KIMI_K3 = Handmade(
    {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "head_dim": 64,
        "intermediate_size": _DENSE,
        "moe_intermediate_size": _WIDTH,
        "num_experts": _EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "num_key_value_heads": 4,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "head_dim": 64,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }
)
"""Its language model; vLLM's class for Kimi-Linear runs it, too."""

HANDMADE = {
    "step-3.5": _step35(),
    "bailing-v2": _bailing_v2(),
    "bailing-v3": _bailing_v3(),
    "inkling": _INKLING,
    "kimi-k3": _KIMI_K3,
}
