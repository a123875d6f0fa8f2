"""Architectures that are too many for CI: each once through vLLM with and without the plugin, from the command line.

    python -m tests.e2e.by_hand FOLDER [NAME ...]

prints for each whether tokens agree with vLLM's own at 16 bits, and whether 30 % of the slots give the same bits as all
of them; docs/models.md records what came out. What vLLM's CPU build does not run itself is said to be so.
"""

import json
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.e2e.architectures import ARCHITECTURES, VOCABULARY, Architecture
from tests.e2e.engines import answer, check_logprobs_close, engine, recorded_layers, runtime_of

_MOE: dict[str, Any] = {
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
_LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MORE = {
    "exaone-moe": Architecture(
        "ExaoneMoeConfig",
        _MOE | _DENSE_FIRST | _ATTENTION | {"first_k_dense_replace": 1},
        written={"swiglu_limits": [0.0, 0.5]},
    ),
    "laguna": Architecture(
        "LagunaConfig",
        _MOE | _DENSE_FIRST | _ATTENTION | {"num_attention_heads_per_layer": [4, 4]},
    ),
    "lfm2-moe": Architecture(
        "Lfm2MoeConfig", _MOE | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    ),
    "afmoe": Architecture(
        "AfmoeConfig",
        _MOE | _ATTENTION | {"num_dense_layers": 1},
        written={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2Config",
        _MOE | {"intermediate_size": 96},
        written={"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "cohere2-moe": Architecture("Cohere2MoeConfig", _MOE | _ATTENTION | {"num_shared_experts": 0}),
    "qwen3-next": Architecture("Qwen3NextConfig", _MOE | _LINEAR),
    "solar-open": Architecture("SolarOpenConfig", _MOE),
    "glm-4-moe-lite": Architecture("Glm4MoeLiteConfig", _MOE | _MLA | _DENSE_FIRST),
    "dots1": Architecture("Dots1Config", _MOE | _ATTENTION | {"first_k_dense_replace": 1}),
    "hy-v3": Architecture("HYV3Config", _MOE | _DENSE_FIRST),
    "longcat-flash": Architecture(
        "LongcatFlashConfig",
        _MLA
        | {
            "num_layers": 1,
            "ffn_hidden_size": 192,
            "moe_topk": 2,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 64,
        },
        written={"zero_expert_type": "identity"},
    ),
    "granite-moe-hybrid": Architecture(
        "GraniteMoeHybridConfig",
        {
            "intermediate_size": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "layer_types": ["attention", "attention"],
        },
    ),
    "granite-moe-shared": Architecture(
        "GraniteMoeSharedConfig",
        {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    ),
    "gemma4": Architecture(
        "Gemma4TextConfig",
        _MOE
        | _ATTENTION
        | {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 32,
        },
    ),
    "axk1": Architecture("AXK1Config", _MOE | _MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    "jamba": Architecture(
        "JambaConfig",
        _MOE
        | {
            "intermediate_size": 96,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 8,
        },
    ),
    "hunyuan-moe": Architecture("HunYuanMoEV1Config", _MOE | {"intermediate_size": 96, "moe_topk": 2}),
    "flex-olmo": Architecture("FlexOlmoConfig", _MOE | {"intermediate_size": 96}),
    "dbrx": Architecture(
        "DbrxConfig",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
}


def prompts() -> list[dict[str, list[int]]]:
    """Random tokens."""
    chosen = random.Random(0)
    return [{"prompt_token_ids": chosen.choices(range(2, VOCABULARY), k=length)} for length in (5, 33, 12)]


def serve(model: Path, dymoe: dict[str, Any] | None = None) -> Any:
    """An engine."""
    return engine(model, dymoe, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=128)


def check(name: str, folder: Path) -> str:
    """What came out for one architecture, as a sentence."""
    try:
        model = (MORE | ARCHITECTURES)[name].save(folder / name)
    except Exception as error:
        return f"transformers does not write it: {_line(error)}"
    try:
        with serve(model) as llm:
            theirs = answer(llm, prompts(), 12)
    except Exception as error:
        return f"vLLM's CPU build does not run it: {_line(error)}"
    try:
        with serve(model, {"hi": 16}) as llm:
            runtime, layers = runtime_of(llm), []
            for budget in ("100%", "30%"):
                runtime.resize(budget)
                with recorded_layers(runtime) as outputs:
                    ours = answer(llm, prompts(), 12)
                runtime.check_integrity()
                layers.append(outputs)
            same = all(torch.equal(a, b) for a, b in zip(*layers, strict=True))
    except Exception as error:
        traceback.print_exc()
        return f"refused or failed: {_line(error)}"
    bits = "the same bits at 30 %" if same else "OTHER BITS at 30 %"
    try:
        check_logprobs_close(ours, theirs)
    except AssertionError as error:
        return f"OTHER TOKENS ({_line(error)}), {bits}"
    equal = sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    return f"vLLM's tokens ({equal} of {len(ours)} answers to the last), {bits}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for chosen in sys.argv[2:] or MORE:
        print("BY HAND", json.dumps({chosen: check(chosen, root)}), flush=True)
