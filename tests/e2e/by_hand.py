"""Tests more architectures and formats than CI has time for (`make models`).

    python -m tests.e2e.by_hand [--missing] [NAME ...] [NAME:KIND ...]

NAME is an architecture at 16 bits; with "-pictures" its model also reads pictures. KIND is one of the published float
formats, or integers. Each model is served three ways: by vLLM at 16 bits without the plugin (with a KIND: with
dequantized weights), by vLLM alone as published, and with the plugin at 100 and at 30 % of the slots, which must give
the same bits. The results go into models.json; `make docs` combines them with families.json into the tables of
docs/models.md. --missing tests only what models.json lacks, and so continues a run that was stopped. Models with Triton
kernels run in a process of their own, which gets the option --triton.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

if "--triton" in sys.argv:
    import tests.support.triton_on_cpu  # noqa: F401  (before vLLM)

import torch
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router, router_factory, zero_expert_router
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

from tests.e2e.architectures import ARCHITECTURES, EXAONE_MOE, GEMMA4, QWEN3_NEXT, Architecture
from tests.e2e.engines import (
    answer,
    answers_at_budgets,
    check_logprobs_close,
    random_prompts,
    server_of,
    small_engine,
)
from tests.e2e.handmade import HANDMADE
from tests.e2e.pictures import SEEING, TAKES_PICTURES, Seeing
from tests.e2e.quantized import check_store, write
from tests.quantize.readers.kinds import FLOATS, INTEGERS

RECORD = Path(__file__).parent / "models.json"
LENGTHS = (5, 33, 12)
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
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
_GRANITE = {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
MORE = {
    "exaone-moe": EXAONE_MOE,
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
    "solar-open": Architecture("SolarOpenConfig", _MOE),
    "granite-moe-hybrid": Architecture(
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "layer_types": ["attention", "attention"],
        },
    ),
    "granite-moe-shared": Architecture("GraniteMoeSharedConfig", _GRANITE),
    "gemma4": GEMMA4,
    "hunyuan-moe": Architecture("HunYuanMoEV1Config", _MOE | {"intermediate_size": 96, "moe_topk": 2}),
    "flex-olmo": Architecture("FlexOlmoConfig", _MOE | {"intermediate_size": 96}),
    "qwen3-next": QWEN3_NEXT,
    "qwen3.5-moe": Architecture("Qwen3_5MoeTextConfig", QWEN3_NEXT.sizes),
    "dots1": Architecture("Dots1Config", _MOE | _ATTENTION | {"first_k_dense_replace": 1, "max_window_layers": 2}),
    "glm-4-moe-lite": Architecture(
        "Glm4MoeLiteConfig",
        _MOE | _MLA | {"q_lora_rank": 64, "mlp_layer_types": ["dense", "sparse"]},
        written={"first_k_dense_replace": 1},
    ),
    "hy-v3": Architecture(
        "HYV3Config",
        _MOE | _DENSE_FIRST,
        written={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 96,
            "route_norm": True,
            "moe_router_use_sigmoid": True,
            "qk_norm": True,
        },
    ),
    "laguna": Architecture("LagunaConfig", _MOE | _DENSE_FIRST | _ATTENTION),
    "mimo-v2": Architecture(
        "MiMoV2FlashConfig",
        _MOE | _DENSE_FIRST | _ATTENTION | {"head_dim": 32, "v_head_dim": 32},
        written={
            "moe_layer_freq": [0, 1],
            "hybrid_layer_pattern": [0, 0],
            "layernorm_epsilon": 1e-5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
        },
    ),
    "glm-5": Architecture("GlmMoeDsaConfig", _MOE | _MLA | {"q_lora_rank": 64, "mlp_layer_types": ["dense", "sparse"]}),
    "kimi-linear": Architecture(
        "KimiLinearConfig",
        _MOE | _MLA | _DENSE_FIRST | {"layer_types": ["full_attention", "full_attention"]},
    ),
    "jamba": Architecture(
        "JambaConfig",
        _MOE
        | {
            "intermediate_size": 96,
            "attn_layer_period": 1,  # without Mamba, which vLLM runs on GPUs only
            "attn_layer_offset": 0,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "num_logits_to_keep": None,
        },
    ),
    "longcat": Architecture(
        "LongcatFlashConfig",
        _MOE
        | _MLA
        | {
            "q_lora_rank": 64,
            "num_layers": 2,
            "ffn_hidden_size": 192,
            "expert_ffn_hidden_size": 96,
            "moe_topk": 2,
            "zero_expert_num": 4,
        },
        written={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
        left_out=r"\.experts\.([89]|1\d)\.",  # experts that compute nothing
    ),
    "ax-k1": Architecture(
        "AXK1Config",
        _MOE | _MLA | {"q_lora_rank": 64, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
        written={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        norms=("model.layers.0.post_mlp_layernorm.weight",),
    ),
    "dbrx": Architecture(
        "DbrxConfig",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "hy-v4": Architecture(
        "HYV4Config",
        _MOE | _MLA | _DENSE_FIRST | _ATTENTION | {"q_lora_rank": 64},
        left_out=r"\.indexer\.",
        renamed={
            r"\.hc_pre\.hc_(attn|mlp|head)": r".hc_\1",
            r"\.hc_(attn|mlp)_layer\.hc_": r".hc_\1_layer.hc_pre.hc_",
            r"hc_head\.hc_(?!head)": "hc_head.hc_head_",
            r"(\.mlp\..*)linear_gate": r"\1gate_proj",
        },
    ),
    "deepseek-v3.2": Architecture("DeepseekV32Config", _MOE | _MLA | _DENSE_FIRST | {"q_lora_rank": 64}),
    "minimax-m3": Architecture(
        "MiniMaxM3VLTextConfig",
        _MOE | _DENSE_FIRST | {"rotary_dim": 16, "intermediate_size": 96, "dense_intermediate_size": 192},
    ),
}


# Sizes that are multiples of 128: vLLM's CPU build computes FP8 itself for no others.
MORE["qwen3-moe-128"] = replace(
    ARCHITECTURES["qwen3-moe"], sizes=ARCHITECTURES["qwen3-moe"].sizes | {"moe_intermediate_size": 128}
)
MORE["transformers"] = replace(ARCHITECTURES["qwen3-moe"], settings={"model_impl": "transformers"})
QUANTIZED = (
    "gpt-oss:mxfp4",
    *(f"qwen3-moe:{kind}" for kind in FLOATS if kind not in ("mxfp4", "mxfp4-deepseek-v4")),
    "qwen3-moe-128:fp8-blocks",
    "minimax-m2:fp8-blocks",
    *(f"glm-4-moe:{kind}" for kind in ("fp8-blocks", "nvfp4-modelopt")),
    *(f"deepseek-v3:{kind}" for kind in ("fp8-blocks", "nvfp4-modelopt")),
    *(f"mixtral:{kind}" for kind in ("fp8-compressed-tensors", "nvfp4-modelopt")),
    *(f"qwen3-moe:{kind}" for kind in INTEGERS),
    *(f"qwen3-next:{kind}" for kind in ("fp8-blocks", "nvfp4-modelopt")),
    *(f"llama-4:{kind}" for kind in ("fp8-compressed-tensors", "nvfp4-compressed-tensors")),
    "deepseek-v4:mxfp4-deepseek-v4",
)


INTERPRETED = {"deepseek-v4"}
"""Models whose steps have Triton kernels, which Triton's interpreter runs on a CPU."""
PICTURES: dict[str, Any] = {f"{name}-pictures": model for name, model in SEEING.items()}
MODELS: dict[str, Any] = MORE | ARCHITECTURES | HANDMADE | PICTURES


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Repair what keeps vLLM's CPU build (0.32) from running some models.

    Its routers support sigmoids only within groups, so all experts become one group, which gives the same routing.
    LongCat's router, some of whose experts return their input, is written in torch. DeepSeek-V4's plan of its attention
    lacks two entries that are None on a CPU.
    """

    def router(**settings: Any) -> CPURouter:
        if settings["scoring_func"] == "sigmoid" and settings["custom_routing_function"] is None:
            grouped = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
            settings |= {} if settings["use_grouped_topk"] else grouped
        return CPURouter(**settings)

    planned = DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler

    def tiles(self: Any, tokens: int) -> dict[str, None]:
        return {"c1a": None, "c2a": None} | planned(self, tokens)

    with (
        mock.patch.object(router_factory, "CPURouter", router),
        mock.patch.object(fused_topk_bias_router.ops, "topk_softmax", _topk_softmax),
        mock.patch.object(zero_expert_router, "zero_experts_compute_triton", _zero_experts),
        mock.patch.object(DeepseekV4CPUSparseSWAMetadataBuilder, "build_tile_scheduler", tiles),
    ):
        yield


def _topk_softmax(
    weights: torch.Tensor,  # float32 [tokens, experts of a token], written
    ids: torch.Tensor,  # [tokens, experts of a token], written
    _: torch.Tensor,
    logits: torch.Tensor,  # [tokens, experts]
    renormalize: bool,
    bias: torch.Tensor | None,  # [experts]; it decides, but is no part of the weights
    **_ignored: Any,
) -> None:
    scores = logits.float().softmax(-1)
    ids.copy_((scores if bias is None else scores + bias).topk(ids.shape[1]).indices)
    chosen = scores.gather(1, ids.long())
    weights.copy_(chosen / chosen.sum(1, keepdim=True) if renormalize else chosen)


def _zero_experts(
    *,
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Return what experts from ``num_experts`` on add: their weights times x."""
    assert zero_expert_type == "identity"
    scales = (expert_scales * (expert_indices >= num_experts)).sum(1, keepdim=True)
    return (scales * hidden_states).to(hidden_states.dtype)


def check(name: str, kind: str, folder: Path) -> dict[str, str]:
    """Return the results for one architecture: a sentence for each case."""
    architecture, experts = MODELS[name], None
    sees = isinstance(architecture, Seeing)
    prompts = architecture.prompts(LENGTHS) if sees else random_prompts(LENGTHS)
    settings = TAKES_PICTURES if sees else architecture.settings
    try:
        if kind:
            experts = write(architecture, kind, folder, dense=kind in INTEGERS and kind not in ("gptq-ordered", "int8"))
        else:
            architecture.save(folder / "plain")
    except Exception as error:
        return {"failed": f"transformers does not write it: {_line(error)}"}
    served = folder / ("quantized" if kind else "plain")
    theirs, why = _of_vllm(folder / "plain", prompts, settings)
    if theirs is None:
        return {"failed": f"vLLM's CPU build does not run it: {why}"}
    alone, why = _of_vllm(served, prompts, settings) if kind else (theirs, "")
    try:
        with small_engine(served, {} if kind else {"high": 16}, **settings) as llm:
            if experts is not None:
                check_store(server_of(llm).store, experts)
            ours = answers_at_budgets(llm, ("100%", "30%"), lambda: answer(llm, prompts, 12))
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"refused or failed: {_line(error)}"}
    return {
        "answers": _compare(ours, theirs),
        **({"alone": why if alone is None else _compare(ours, alone)} if kind else {}),
    }


def _of_vllm(model: Path, prompts: list[Any], settings: dict[str, Any]) -> tuple[Any, str]:
    """vLLM's own answers, or None and the reason why there are none."""
    try:
        with small_engine(model, **settings) as llm:
            return answer(llm, prompts, 12), ""
    except Exception as error:
        return None, _line(error)


def _compare(ours: Any, theirs: Any) -> str:
    try:
        check_logprobs_close(ours, theirs)
    except AssertionError as error:
        return f"OTHERS: {_line(error)}"
    return f"{sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))} of {len(ours)}"


def _line(error: BaseException) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0][:160]}" if said else type(error).__name__


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or [
        *MORE,
        *HANDMADE,
        *(name for name in MODELS if name.endswith("-pictures")),
        *QUANTIZED,
    ]
    for chosen in names:
        if "--missing" in sys.argv and chosen in recorded():
            continue
        if chosen.partition(":")[0] in INTERPRETED and "--triton" not in sys.argv:
            subprocess.run([sys.executable, "-m", "tests.e2e.by_hand", "--triton", chosen], check=True)
            continue
        with tempfile.TemporaryDirectory() as temporary, repaired():
            found = check(*chosen.partition(":")[::2], Path(temporary))
        print("BY HAND", json.dumps({chosen: found}), flush=True)
        RECORD.write_text(json.dumps(dict(sorted((recorded() | {chosen: found}).items())), indent=1) + "\n")
