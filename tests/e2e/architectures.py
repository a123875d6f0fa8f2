"""Small random checkpoints of many architectures, written by transformers.

Every model has few layers and experts, a small vocabulary and no tokenizer. The sizes are deliberately not multiples of
64 rows or columns: experts have such sizes once tensor parallelism has split them.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.e2e.engines import VOCABULARY

_HIDDEN = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    config: str  # name of the configuration class in transformers; the model class follows from it
    sizes: dict[str, Any]  # sizes that differ from the common ones
    written: dict[str, Any] = field(default_factory=dict)
    """Changes to config.json, where transformers writes other names than published checkpoints have."""
    norms: tuple[str, ...] = ()  # weights of norms that vLLM asks for and transformers does not write
    left_out: str = ""  # expression for names of tensors that transformers writes and published checkpoints lack
    renamed: dict[str, str] = field(default_factory=dict)
    """Expressions for names that transformers writes, and what published checkpoints have instead."""
    settings: dict[str, Any] = field(default_factory=dict)  # settings that an engine needs for the model

    def save(self, folder: Path, *, fused: bool = False) -> Path:
        """Write a random bf16 checkpoint, with the same weights every time.

        With ``fused``, one tensor holds all experts of a layer, as in the memory of transformers 5, instead of the
        tensors that checkpoints of this architecture have.
        """
        config = getattr(transformers, self.config)(**(COMMON | self.sizes))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name, tensor in model.state_dict().items():
            fill(name, tensor)
        model.save_pretrained(folder, save_original_format=not fused)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | self.written))
        if self.norms or self.left_out or self.renamed:
            tensors = load_file(folder / "model.safetensors")
            kept = (name for name in tensors if not (self.left_out and re.search(self.left_out, name)))
            tensors = {self._published(name): tensors[name] for name in kept}
            ones = {name: torch.ones(_HIDDEN, dtype=torch.bfloat16) for name in self.norms}
            save_file(tensors | ones, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _published(self, name: str) -> str:
        for written, published in self.renamed.items():
            name = re.sub(written, published, name)
        return name


def fill(name: str, tensor: torch.Tensor) -> None:
    """Fill a tensor with weights large enough for experts to matter.

    With transformers' own small weights the residual stream would hide what the experts compute.
    """
    if not tensor.is_floating_point():
        return
    if name.endswith(("bias", "sinks")):
        tensor.normal_(std=0.3)
    elif tensor.dim() > 1 and "embed" not in name:
        tensor.normal_(std=1.5 * (_HIDDEN if "experts" in name else tensor.shape[-1]) ** -0.5)


_EIGHT = {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
_ROUTED = {"intermediate_size": 192, "n_routed_experts": 8, "first_k_dense_replace": 1}
_DEEPSEEK = _ROUTED | {
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
ARCHITECTURES = {
    "mixtral": Architecture("MixtralConfig", _EIGHT | {"intermediate_size": 160}),
    "qwen2-moe": Architecture(
        "Qwen2MoeConfig",
        _QWEN
        | {
            "moe_intermediate_size": 96,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 128,
            "intermediate_size": 192,
        },
    ),
    "qwen3-moe": Architecture("Qwen3MoeConfig", _QWEN | {"norm_topk_prob": True, "head_dim": 32}),
    "olmoe": Architecture("OlmoeConfig", {"intermediate_size": 72, "num_experts": 8, "num_experts_per_tok": 4}),
    "deepseek-v2": Architecture(
        "DeepseekV2Config",
        _DEEPSEEK
        | {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 96,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3Config",
        _DEEPSEEK
        | {"moe_intermediate_size": 64, "n_shared_experts": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 2.5},
    ),
    "gpt-oss": Architecture("GptOssConfig", _EIGHT | {"head_dim": 32, "sliding_window": 128}),
    "phi-3.5-moe": Architecture(
        "PhimoeConfig",
        _EIGHT | {"attention_bias": True, "lm_head_bias": True},
        # The name in microsoft/Phi-3.5-MoE-instruct. With the name that transformers writes, vLLM would choose
        # transformers' model, which fails.
        written={"architectures": ["PhiMoEForCausalLM"]},
    ),
    "llama-4": Architecture(
        "Llama4TextConfig",
        _EIGHT
        | {"intermediate_size_mlp": 192, "num_experts_per_tok": 1, "head_dim": 32, "interleave_moe_layer_step": 1},
    ),
    "glm-4-moe": Architecture(
        "Glm4MoeConfig",
        _ROUTED
        | {
            "moe_intermediate_size": 96,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granite-moe": Architecture("GraniteMoeConfig", _EIGHT),
    "ernie-4.5-moe": Architecture(
        "Ernie4_5_MoeConfig",
        {
            "intermediate_size": 192,
            "moe_intermediate_size": 96,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "head_dim": 32,
        },
    ),
}

NEMOTRON_H = Architecture(
    "NemotronHConfig",
    {
        "layers_block_type": ["moe", "full_attention", "moe"],
        "num_hidden_layers": 3,
        "head_dim": 32,
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
)
"""Experts with two matrices, which vLLM itself runs only on GPUs."""

QWEN3_NEXT = Architecture(
    "Qwen3NextConfig",
    {
        "moe_intermediate_size": 64,
        "intermediate_size": 96,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "norm_topk_prob": True,
    },
)
"""Linear attention in every second layer."""

EXAONE_MOE = Architecture(
    "ExaoneMoeConfig",
    # Without swiglu_limits: the experts of vLLM's CPU build (0.32) do not clamp.
    {
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        # vLLM uses positions in every layer; transformers leaves them out of layers with full attention.
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 512,
    },
)

GEMMA4 = Architecture(
    "Gemma4TextConfig",
    {
        "intermediate_size": 192,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "layer_types": ["full_attention", "full_attention"],
        "head_dim": 32,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    },
)
