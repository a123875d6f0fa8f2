"""Experts of two matrices through the real engine: Nemotron-H's, which vLLM itself runs on GPUs only.

Its answers are compared with transformers' model. vLLM refuses such layers on a CPU when it describes them, since its
own kernels cannot compute them there; ours can.
"""

from unittest import mock

import pytest
import torch
import transformers

from tests.e2e.architectures import Architecture
from tests.e2e.engines import answer, engine, recorded_layers, runtime_of
from tests.e2e.test_models import TOKENS, prompts

pytestmark = pytest.mark.engine

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


def test_experts_without_a_gate_agree_with_transformers_at_every_budget(tmp_path):
    folder = NEMOTRON_H.save(tmp_path / "model")
    on_a_gpu = mock.patch("vllm.model_executor.layers.fused_moe.config.current_platform")
    with on_a_gpu, engine(folder, {"hi": 16}, skip_tokenizer_init=True, max_num_seqs=8, max_model_len=128) as llm:
        runtime, layers = runtime_of(llm), []
        assert not runtime.experts.formats[16].has_gate
        for budget in ("100%", "30%"):
            runtime.resize(budget)
            with recorded_layers(runtime) as outputs:
                answers = answer(llm, prompts(), TOKENS)
            runtime.check_integrity()
            layers.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*layers, strict=True))
    behind = []
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ours in zip(prompts(), answers, strict=True):
        read = prompt["prompt_token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([read + ours.tokens])).logits[0, len(read) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ours.tokens)[:, None])[:, 0]
        behind.append(logits.max(1).values - chosen)
    # bf16 against float32: now and then a router chooses otherwise. Without experts nearly all would differ.
    missed = torch.cat(behind)
    assert (missed == 0).float().mean() > 0.8, missed.tolist()
