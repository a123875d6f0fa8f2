"""Adapters on the dense layers: vLLM's own answers, and another one's than without an adapter."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.engines import MODEL, answer, check_logprobs_close, engine, prompts

pytestmark = pytest.mark.engine

RANK = 8


@pytest.fixture
def adapter(tmp_path):
    """A random adapter of every layer's queries and values, large enough to change what is said."""
    model = json.loads((MODEL / "config.json").read_text())
    hidden, heads = model["hidden_size"], {"q_proj": "num_attention_heads", "v_proj": "num_key_value_heads"}
    head = model.get("head_dim") or hidden // model["num_attention_heads"]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(model["num_hidden_layers"]):
        for name, count in heads.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            tensors[f"{stem}_A.weight"] = torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            tensors[f"{stem}_B.weight"] = torch.randn(model[count] * head, RANK, generator=generator) * 0.5
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(heads), "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return tmp_path


def answers(adapter, dymoe=None):
    """With the adapter, and without it."""
    from vllm.lora.request import LoRARequest

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with engine(MODEL, dymoe, enable_lora=True, max_lora_rank=RANK, lora_target_modules=targets) as llm:
        plain, generate = answer(llm, prompts()[:4], 12), llm.generate
        request = LoRARequest("adapter", 1, str(adapter))
        llm.generate = lambda *arguments, **settings: generate(*arguments, **settings, lora_request=request)
        return answer(llm, prompts()[:4], 12), plain


def test_an_adapter_of_attention_works_as_without_the_plugin(adapter):
    theirs, _ = answers(adapter)
    ours, plain = answers(adapter, {"hi": 16, "expert_budget": "30%"})
    check_logprobs_close(ours, theirs)
    assert [a.tokens for a in ours] != [a.tokens for a in plain]
