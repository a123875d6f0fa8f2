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
        tensors = {name: self._random(name, torch.empty(shape)) for name, shape in self.shapes.items()}
        folder.mkdir()
        own = {}
        if self.own_code:
            own = {"auto_map": {"AutoConfig": "configuration.Config"}}
            (folder / "configuration.py").write_text(_CODE.format(self.config["model_type"]))
        described = COMMON | {"dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 10000.0} | self.config | own
        (folder / "config.json").write_text(json.dumps(described))
        stored = {name: x.bfloat16() if name.endswith("weight") else x for name, x in tensors.items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        if self.words:
            make_tokenizer(last_ids(self.words), {}).save_pretrained(folder)
        return folder

    def _random(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "norm" in name:
            return tensor.fill_(float(not self.zero_norms))
        if name.endswith("tid2eid"):  # the experts of each token
            experts = torch.rand(len(tensor), self.config["n_routed_experts"])
            return experts.argsort(1)[:, : tensor.shape[1]].contiguous()
        if "embed" in name:
            return tensor.normal_()
        if name.endswith(("_base", "_scale", "attn_sink")):
            return tensor.normal_(std=0.3)
        fill(name, tensor)
        return tensor


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


def _compressor(at: str, ratio: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of what joins ``ratio`` keys to one; with 4, neighbours overlap."""
    both = size * (2 if ratio == 4 else 1)
    shapes = {f"{at}.{word}.weight": (both, _HIDDEN) for word in ("wkv", "wgate")}
    return shapes | {f"{at}.ape": (ratio, both), f"{at}.norm.weight": (size,)}


def _deepseek_v4() -> Handmade:
    """DeepSeek-V4 with its three kinds of attention.

    The first layer's experts follow from the token. vLLM's CPU build (0.32, with AMX) has kernels only for at least 64
    experts, 6 of them for a token, for heads of 512 and for an indexer of 128.
    """
    ratios, experts, top_k = (0, 4, 128), 64, 6
    heads, size, rank, groups, group_rank, indexers, indexer, streams = 4, 512, 64, 2, 64, 8, 128, 4
    vocabulary, mixed = COMMON["vocab_size"], streams * _HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (vocabulary, _HIDDEN),
        "head.weight": (vocabulary, _HIDDEN),
        "norm.weight": (_HIDDEN,),
        "hc_head_fn": (streams, mixed),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
    }
    for layer, ratio in enumerate(ratios):
        at = f"layers.{layer}"
        shapes |= {f"{at}.attn_norm.weight": (_HIDDEN,), f"{at}.ffn_norm.weight": (_HIDDEN,)}
        for block in ("attn", "ffn"):
            mixes = (2 + streams) * streams
            shapes |= {f"{at}.hc_{block}_fn": (mixes, mixed), f"{at}.hc_{block}_base": (mixes,)}
            shapes[f"{at}.hc_{block}_scale"] = (3,)
        shapes |= {
            f"{at}.attn.wq_a.weight": (rank, _HIDDEN),
            f"{at}.attn.q_norm.weight": (rank,),
            f"{at}.attn.wq_b.weight": (heads * size, rank),
            f"{at}.attn.wkv.weight": (size, _HIDDEN),
            f"{at}.attn.kv_norm.weight": (size,),
            f"{at}.attn.wo_a.weight": (groups * group_rank, heads * size // groups),
            f"{at}.attn.wo_b.weight": (_HIDDEN, groups * group_rank),
            f"{at}.attn.attn_sink": (heads,),
        }
        if ratio:
            shapes |= _compressor(f"{at}.attn.compressor", ratio, size)
        if ratio == 4:
            shapes |= _compressor(f"{at}.attn.indexer.compressor", ratio, indexer)
            shapes[f"{at}.attn.indexer.wq_b.weight"] = (indexers * indexer, rank)
            shapes[f"{at}.attn.indexer.weights_proj.weight"] = (indexers, _HIDDEN)
        shapes[f"{at}.ffn.gate.weight"] = (experts, _HIDDEN)
        shapes |= {f"{at}.ffn.gate.tid2eid": (vocabulary, top_k)} if layer == 0 else {f"{at}.ffn.gate.bias": (experts,)}
        for place in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
            up, down = (_WIDTH, _HIDDEN), (_HIDDEN, _WIDTH)
            shapes |= {f"{at}.ffn.{place}.w{n}.weight": shape for n, shape in ((1, up), (2, down), (3, up))}
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_act": "silu",
        "num_hidden_layers": len(ratios),
        "num_hash_layers": 1,
        "num_key_value_heads": 1,
        "compress_ratios": list(ratios),
        "head_dim": size,
        "qk_rope_head_dim": 64,
        "q_lora_rank": rank,
        "o_lora_rank": group_rank,
        "o_groups": groups,
        "sliding_window": 32,
        "index_n_heads": indexers,
        "index_head_dim": indexer,
        "index_topk": 512,
        "hc_mult": streams,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "moe_intermediate_size": _WIDTH,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    return Handmade(config, shapes)


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
MINICPM = Handmade(
    {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "hidden_act": "silu",
        "intermediate_size": _WIDTH,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 64,
    },
    own_code=True,
)
"""Experts that the model's own code computes."""

HANDMADE = {
    "step-3.5": _step35(),
    "bailing-v2": _bailing_v2(),
    "bailing-v3": _bailing_v3(),
    "deepseek-v4": _deepseek_v4(),
    "inkling": _INKLING,
    "kimi-k3": _KIMI_K3,
}
