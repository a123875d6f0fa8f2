"""LoRA adapters of dense layers in addition to streamed experts.

Tested against transformers' answers, and for the same bits at every budget.

vLLM itself runs models with experts under LoRA only on GPUs, so the reference is transformers' model with the adapter's
product added to its weights.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.e2e.engines import MODEL, answers_at_budgets, engine, prompts, share_of_likeliest

pytestmark = pytest.mark.engine

RANK, TARGETS = 8, ["q_proj", "o_proj"]
# Room for two adapters, although there is one: in vLLM's CPU build, requests without an adapter get the last place's
# contents.
SETTINGS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "lora_target_modules": TARGETS}


def random_adapter():
    """Return an adapter that changes the model's answers, under PEFT's tensor names."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, columns, rows in (("q_proj", hidden, heads), ("o_proj", heads, hidden)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return tensors


def write(adapter, folder):
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def answers(llm, adapter):
    """Return prompt tokens and generated tokens, by request.

    All requests run together; every second one uses the adapter.
    """
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [adapter if number % 2 else None for number in range(8)]
    done = llm.generate(prompts()[:8], sampling, use_tqdm=False, lora_request=requests)
    return [list(output.prompt_token_ids) for output in done], [list(output.outputs[0].token_ids) for output in done]


def merge(model, adapter):
    for name in (name for name in adapter if name.endswith("lora_B.weight")):
        place = name.removesuffix(".lora_B.weight")
        weight = model.get_submodule(place.removeprefix("base_model.model.")).weight
        weight.data += adapter[name] @ adapter[f"{place}.lora_A.weight"]


@pytest.mark.parametrize("dense", [16, 8])
def test_adapters_of_dense_layers_beside_streamed_experts(tmp_path, dense):
    adapter = random_adapter()
    request = LoRARequest("adapter", 1, write(adapter, tmp_path / "adapter"))
    with engine(dymoe={"high": 16, "dense": dense}, **SETTINGS) as llm:
        read, said = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm, request))
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    plain, adapted = ((read[first::2], said[first::2]) for first in (0, 1))
    # Few tokens differ between bfloat16 and float32 (near ties); most differ between the two models.
    assert share_of_likeliest(model, *plain) > 0.85
    assert share_of_likeliest(model, *adapted) < 0.5
    merge(model, adapter)
    assert share_of_likeliest(model, *adapted) > 0.85
