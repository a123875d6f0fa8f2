"""Many architectures through the real engine at 16 bits.

Tokens have to be vLLM's own, and the same at every budget; gates have to reproduce the routers' choices.
"""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.cache.store.stores import read
from tests.e2e.architectures import ARCHITECTURES, EXAONE_MOE, NEMOTRON_H
from tests.e2e.engines import (
    answer,
    answers_at_budgets,
    check_first_logprobs_close,
    check_logprobs_close,
    gates_compared,
    python_steps,
    random_prompts,
    resize,
    server_of,
    share_of_likeliest,
    small_engine,
    watch,
)
from tests.e2e.handmade import HANDMADE, MINICPM
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.policies.schedule import Schedule
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert

pytestmark = pytest.mark.engine

BUDGETS, BOTH = ("100%", "50%", "minimum"), {"high": 16, "low": 4}
TOKENS = 12


def answers(llm):
    return answer(llm, random_prompts(), TOKENS)


def its_neighbour(gate):
    """Return a wrong gate: each expert gets the score of its neighbour."""
    return replace(gate, logits=lambda x: gate.logits(x).roll(1, -1))


def check_converted(llm, folder):
    """Check that packing during loading writes the bytes that `quantize` writes."""
    store, converted = server_of(llm).store, folder.with_name("converted")
    convert(Checkpoint.open(folder), converted, Options(**BOTH))
    files = FileStore(converted)
    assert store.experts == files.experts
    for key in all_keys(files.experts):
        assert torch.equal(read(store, key), read(files, key)), key
    files.close()


def check_precisions_by_load(llm):
    """Check that every token of a prompt has the same weight.

    With MLA there are no queries and keys from which tokens could be weighted.
    """
    server = server_of(llm)
    resize(llm, "100%")
    llm.collective_rpc("dymoe_precision", kwargs={"retention": 0.5})
    texts = [{"prompt_token_ids": list(tokens)} for tokens in (range(5, 35), range(90, 101))]
    answers_at_budgets(llm, ("100%", "minimum"), lambda: answer(llm, texts, max_tokens=6))
    watched = watch(server)
    answer(llm, texts, max_tokens=6)
    read = [(routing, plan) for routing, plan in watched.seen if routing.prompt is not None]
    assert len(read) == len(server.experts.layers) < len(watched.seen)
    for routing, plan in read:
        assert torch.equal(routing.prompt.heavy, routing.prompt.rows)
        high = {expert for expert, precision in plan.items() if precision is Precision.HIGH}
        assert len(high) == Schedule(0.5).critical(routing.layer, routing.num_layers, len(plan))
        load = routing.ids.flatten().bincount().tolist()
        least, most = min((load[e] for e in high), default=99), max((load[e] for e in plan.keys() - high), default=0)
        assert least >= most


def check_sixteen_bits(folder, served=None, policy=None, more=lambda llm: None):
    """Check a model at 16 bits against vLLM; return vLLM's answers.

    Args:
        folder: the checkpoint.
        served: another checkpoint of the same model for the plugin to serve.
        policy: options of the policy.
        more: further checks of the engine.
    """
    with small_engine(folder) as llm:
        theirs = answers(llm)
    with small_engine(served or folder, BOTH | (policy or {})) as llm:
        check_converted(llm, folder)
        with gates_compared(llm) as shares:
            answer(llm, random_prompts(), max_tokens=2)
        with gates_compared(llm, its_neighbour) as planted:
            answer(llm, random_prompts(), max_tokens=2)
        ours = answers_at_budgets(llm, BUDGETS, lambda: answers(llm))
        more(llm)
    # Applied to its layer's own input, the gate that was found must choose what vLLM chose, or a near tie.
    assert min(shares) == 1
    assert min(planted) < 0.9, "a wrong gate passes for the right one"
    check_logprobs_close(ours, theirs)
    check_first_logprobs_close(ours, theirs)
    return theirs


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - {"qwen3-moe", "deepseek-v2", "glm-4-moe"}))
def test_sixteen_bits_agree_with_vllm_at_every_budget(name, tmp_path):
    check_sixteen_bits(ARCHITECTURES[name].save(tmp_path / name))


def test_one_tensor_for_a_whole_layer_is_the_same_model_as_one_for_each_projection(tmp_path):
    """vLLM reads qwen3-moe checkpoints with either set of tensor names."""
    fused = ARCHITECTURES["qwen3-moe"].save(tmp_path / "fused", fused=True)
    check_sixteen_bits(ARCHITECTURES["qwen3-moe"].save(tmp_path / "separate"), fused)


def test_without_queries_and_keys_the_number_of_tokens_decides(tmp_path):
    policy = {
        "policy": "dymoe",
        "policy_options": {"retention": 1, "high_by": "depth", "heavy_share": 0.2, "reuse_high": False},
    }
    check_sixteen_bits(ARCHITECTURES["deepseek-v2"].save(tmp_path / "mla"), None, policy, check_precisions_by_load)


def test_experts_without_a_gate_agree_with_transformers_at_every_budget(tmp_path):
    """vLLM refuses Nemotron-H on a CPU, where its kernels cannot compute the layers.

    The plugin's kernels can, so the test only makes vLLM believe that it is on a GPU.
    """
    folder = NEMOTRON_H.save(tmp_path / "model")
    on_a_gpu = mock.patch("vllm.model_executor.layers.fused_moe.config.current_platform")
    with on_a_gpu, small_engine(folder, {"high": 16}) as llm:
        assert not server_of(llm).experts.formats[16].has_gate
        given = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read = [prompt["prompt_token_ids"] for prompt in random_prompts()]
    # In bf16 a router sometimes chooses other experts than in float32. Without experts nearly all tokens would differ.
    assert share_of_likeliest(model, read, [ours.tokens for ours in given]) > 0.8


def test_experts_that_a_models_own_code_computes_are_refused_by_the_models_name(tmp_path):
    folder = MINICPM.save(tmp_path / "model")
    with (
        pytest.raises(ConfigError, match="MiniCPMForCausalLM runs none of its experts in vLLM's MoE layer"),
        small_engine(folder, {"high": 16}, **MINICPM.settings),
    ):
        pass


LIMITS = [0.6, 0.3]  # of the dense layer and of the experts; activations without limits are three times as large


def clamp(model):
    """Let transformers' model clamp activations as vLLM's layers do.

    The gate is clamped from above, up on both sides. transformers' own layers have no limits.
    """
    for layer, limit in zip(model.model.layers, LIMITS, strict=True):
        for module in layer.mlp.modules():
            if hasattr(module, "gate_up_proj"):
                module._apply_gate = lambda both, limit=limit: clamped(*both.chunk(2, -1), limit)
            elif hasattr(module, "gate_proj"):
                module.forward = lambda x, m=module, limit=limit: m.down_proj(
                    clamped(m.gate_proj(x), m.up_proj(x), limit)
                )
    model.set_experts_implementation("batched_mm")  # the only one that calls _apply_gate on every CPU


def clamped(gate, up, limit):
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def test_a_clamp_that_vllm_leaves_out_on_a_cpu_agrees_with_transformers_at_every_budget(tmp_path):
    """vLLM's dense layers clamp on every device, its experts only on GPUs."""
    folder = replace(EXAONE_MOE, written={"swiglu_limits": LIMITS}).save(tmp_path / "model")
    with small_engine(folder, {"high": 16}) as llm:
        given = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read, said = [prompt["prompt_token_ids"] for prompt in random_prompts()], [ours.tokens for ours in given]
    plain = share_of_likeliest(model, read, said)
    clamp(model)
    right = share_of_likeliest(model, read, said)
    assert right > 0.8
    assert plain < right - 0.2, "the limits change nothing"


def test_step_35_clamps_the_layers_that_its_checkpoint_names(tmp_path):
    """Compared with the formula.

    vLLM's CPU build has no such experts, and transformers no such model.
    """
    made, folder = HANDMADE["step-3.5"], tmp_path / "model"
    # vLLM's CPU build routes by sigmoids only within groups of experts.
    changes = {"swiglu_limits": [0, 7.0, 0], "moe_router_activation": "softmax"}
    replace(made, config=made.config | changes).save(folder)
    tensors, seen = load_file(folder / "model.safetensors"), []
    for name, tensor in tensors.items():
        if ".moe." in name and name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor *= 8  # beyond the limit
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with small_engine(folder, {"high": 16}) as llm:
        planned = server_of(llm).host_planned

        def forward(routing, activation):
            given = routing.layer + 1, routing.x.double(), routing.ids.long(), routing.weights.double()
            seen.append((*given, original(routing, activation).double()))
            return seen[-1][-1].bfloat16()

        original = planned.forward
        with mock.patch.object(planned, "forward", forward), python_steps():
            answer(llm, random_prompts(), 2)
    assert {layer for layer, *_ in seen} == {1, 2}
    for layer, x, ids, weights, out in seen:
        words = ("gate", "up", "down")
        gate, up, down = (tensors[f"model.layers.{layer}.moe.{word}_proj.weight"].double()[ids] for word in words)
        silu = torch.nn.functional.silu(torch.einsum("tkwh,th->tkw", gate, x))
        up = torch.einsum("tkwh,th->tkw", up, x)
        plain, clamped = (
            torch.einsum("tkhw,tkw,tk->th", down, inner, weights)
            for inner in (silu * up, silu.clamp(max=7) * up.clamp(-7, 7))
        )
        want, other = (clamped, plain) if layer == 1 else (plain, clamped)
        # Products of about 100 are rounded to bfloat16 before they are added.
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02 * float(want.abs().max()))
        assert (other - want).abs().max() > 0.5 * want.abs().max(), "the limit changes nothing"


def save_with_drafts(folder):
    """Write GLM-4 MoE with a multi-token prediction layer, named as published.

    The embedding outweighs all layers, so the next token mostly follows from the last one. The draft sees the last one
    and is therefore sometimes right.
    """
    ARCHITECTURES["glm-4-moe"].save(folder)
    layers, hidden = 2, 128
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 50
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3
    last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.startswith(last)]:
        noise = torch.randn(tensors[name].shape, generator=generator) * 0.1 * tensors[name].float().abs().mean()
        tensors[name.replace(last, extra)] = (tensors[name] + noise).to(tensors[name].dtype)
    ones, identity = torch.ones(hidden).bfloat16(), torch.eye(hidden).bfloat16()
    tensors |= {
        f"{extra}enorm.weight": ones,
        f"{extra}hnorm.weight": ones.clone(),
        f"{extra}eh_proj.weight": torch.cat((identity, 0.1 * identity), 1),
        f"{extra}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{extra}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{extra}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    return folder


def counts_of_drafts(llm):
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return values["vllm:spec_decode_num_accepted_tokens"], values["vllm:spec_decode_num_draft_tokens"]


def test_drafts_with_experts_are_served_out_of_the_same_slots(tmp_path):
    folder = save_with_drafts(tmp_path / "model")
    want = [a.tokens for a in check_sixteen_bits(folder)]
    speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "disable_log_stats": False}
    with small_engine(folder, {"high": 16}, **speculation) as llm:
        experts, counts = server_of(llm).experts, []
        assert (experts.layers, experts.draft_layers) == ((1, 2), 1)

        def ask():
            before = counts_of_drafts(llm)
            tokens = [a.tokens for a in answers(llm)]
            counts.append([after - earlier for after, earlier in zip(counts_of_drafts(llm), before, strict=True)])
            return tokens

        assert answers_at_budgets(llm, ("100%", "30%"), ask) == want
    assert counts[0] == counts[1]
    right, drafted = counts[0]
    # Measured: 8 of 76. A random draft is right for one token in 512.
    assert 0.05 < right / drafted <= 1, counts
