"""Checkpoints that other tools quantized, through the real engine.

The high version has the checkpoint's bytes, the dense layers have its numbers, and the answers are those of vLLM with
the dequantized weights.
"""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import (
    answer,
    answers_at_budgets,
    check_logprobs_close,
    equal_share,
    random_prompts,
    server_of,
    share_of_likeliest,
    small_engine,
)
from tests.e2e.make_checkpoints import FOLDER
from tests.e2e.quantized import check_store, dequantize_checkpoint, save, write
from tests.quantize.readers.kinds import INTEGERS, gptq, random_integers
from vllm_dymoe.kernels import native
from vllm_dymoe.options import Options
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import convert

pytestmark = pytest.mark.engine

CHECKPOINTS = [
    ("awq", "mixtral"),
    ("mxfp4", "gpt-oss"),
    ("fp8-blocks", "deepseek-v3"),
    ("exported", "qwen3-moe-nvfp4"),  # every file is written by ModelOpt itself
]


def answers(llm):
    return answer(llm, random_prompts(), 12)


def dense_methods(worker):
    modules = worker.model_runner.model.named_modules()
    return {type(m.quant_method).__name__ for name, m in modules if name.endswith(("qkv_proj", "o_proj"))}


@pytest.mark.parametrize(("kind", "model"), CHECKPOINTS)
def test_a_quantized_checkpoint_is_served_with_its_own_numbers(tmp_path, kind, model):
    integers = kind in INTEGERS
    if integers and native.load() is None and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("without our native library vLLM has no quantized dense layers on processors without AVX-512")
    if kind == "exported":
        experts = dequantize_checkpoint(FOLDER / model, tmp_path)
        (tmp_path / "quantized").symlink_to(FOLDER / model)
    else:
        experts = write(ARCHITECTURES[model], kind, tmp_path, dense=integers)
    with small_engine(tmp_path / "plain") as llm:
        want = answers(llm)
    with small_engine(tmp_path / "quantized", {"low": 2, "expert_budget": "50%"}) as llm:
        server = server_of(llm)
        check_store(server.store, experts)
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
        if integers:
            assert (server.options.stored_bits, server.options.group_size) == ((4, 2), 32)
            assert server.store.manifest.quantizer == f"{kind} checkpoint"  # the low version is nested in its codes
            assert "UnquantizedLinearMethod" not in llm.collective_rpc(dense_methods)[0]
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
    if kind == "awq":
        convert(Checkpoint.open(tmp_path / "quantized"), tmp_path / "ours", Options(high=4, low=2, group_size=32))
        with small_engine(tmp_path / "ours", {"expert_budget": "25%"}) as llm:
            assert [a.tokens for a in answers(llm)] == [a.tokens for a in got]
            assert "UnquantizedLinearMethod" not in llm.collective_rpc(dense_methods)[0]


def test_experts_in_the_order_of_their_activations_are_served_beside_dense_layers_of_16_bits(tmp_path):
    """Tokens are compared with transformers' float32 model of the dequantized weights.

    The dense layers have 16 bits.
    """
    experts = write(ARCHITECTURES["qwen3-moe"], "gptq-ordered", tmp_path)
    with small_engine(tmp_path / "quantized", {"low": 2, "expert_budget": "50%"}) as llm:
        got, server = answers(llm), server_of(llm)
        server.check_integrity()
        assert all(fmt.act_order for fmt in server.experts.formats.values())
        check_store(server.store, experts)
        assert llm.collective_rpc(dense_methods)[0] == {"UnquantizedLinearMethod"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    read = [prompt["prompt_token_ids"] for prompt in random_prompts()]
    # Float16 rounds logits of about 10 by 0.004. Columns in another order would change them by several.
    assert share_of_likeliest(model, read, [ours.tokens for ours in got]) > 0.9


def test_signed_bytes_are_served_with_their_own_numbers(tmp_path):
    """W8A8 checkpoints: the weights are the checkpoint's, activations keep 16 bits."""
    experts = write(ARCHITECTURES["qwen3-moe"], "int8", tmp_path)
    with small_engine(tmp_path / "plain") as llm:
        want = answers(llm)
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}) as llm:
        server = server_of(llm)
        assert (server.options.stored_bits, server.options.group_size) == ((8,), 32)
        check_store(server.store, experts)
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8


def test_experts_that_a_tool_left_at_16_bits_are_served_beside_quantized_attention(tmp_path):
    if native.load() is None and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("without our native library vLLM has no quantized dense layers on processors without AVX-512")
    write(ARCHITECTURES["qwen3-moe"], "awq", tmp_path, dense=True)
    plain, tensors = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "quantized"))
    tensors = {name: x for name, x in tensors.items() if ".experts." not in name}
    experts = {name: x for name, x in plain.items() if ".experts." in name}
    described = json.loads((tmp_path / "quantized" / "config.json").read_text())
    described["quantization_config"] |= {"modules_to_not_convert": ["mlp.experts", "mlp.gate"]}
    save(tmp_path / "quantized", described, tensors | experts)
    with small_engine(tmp_path / "plain") as llm:
        want = answers(llm)
    with small_engine(tmp_path / "quantized", {"high": 16, "expert_budget": "50%"}) as llm:
        check_store(server_of(llm).store, experts)
        assert "UnquantizedLinearMethod" not in llm.collective_rpc(dense_methods)[0]
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8


def test_layers_and_projections_in_other_formats_keep_their_numbers(tmp_path):
    """Recipes leave a layer at 16 bits, or give some projections more bits.

    Here these are a down projection, a gate without its up projection, and a down projection with the same bits in
    larger groups with other zeros. An emulated card, which plans and fetches them as a GPU does, gives the same bits.
    """
    model = ARCHITECTURES["qwen3-moe"]
    experts = write(replace(model, sizes=model.sizes | {"num_hidden_layers": 6}), "gptq", tmp_path)
    plain, tensors = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "quantized"))
    for number, name in enumerate(experts):
        if ".layers.1." in name:
            for part in ("qweight", "qzeros", "scales", "g_idx"):
                del tensors[name.replace("weight", part)]
            experts[name] = tensors[name] = plain[name]
        elif (".layers.3." in name and "down" in name) or (".layers.2." in name and "gate" in name):
            experts[name] = random_integers(*plain[name].shape, 32, bits=8, symmetric=True, seed=number)
            tensors |= {name.replace("weight", part): tensor for part, tensor in gptq(experts[name]).items()}
            plain[name] = experts[name].dequantize()
        elif ".layers.4." in name and "down" in name:
            experts[name] = random_integers(*plain[name].shape, 64, seed=number)
            tensors |= {name.replace("weight", part): tensor for part, tensor in gptq(experts[name]).items()}
            plain[name] = experts[name].dequantize()
    described = json.loads((tmp_path / "quantized" / "config.json").read_text())
    eight = r".*layers\.3\..*down_proj", r".*layers\.2\..*gate_proj"
    rules = {pattern: {"bits": 8} for pattern in eight}
    rules[r".*layers\.4\..*down_proj"] = {"group_size": 64, "sym": False}
    described["quantization_config"] |= {"dynamic": rules}
    save(tmp_path / "quantized", described, tensors)
    save(tmp_path / "plain", json.loads((tmp_path / "plain" / "config.json").read_text()), plain)
    with small_engine(tmp_path / "plain") as llm:
        want = answers(llm)
    with small_engine(tmp_path / "quantized", {"expert_budget": "50%"}) as llm:
        server = server_of(llm)
        assert (server.options.stored_bits, server.experts.kinds) == ((4,), (0, 1, 2, 3, 4, 0))
        check_store(server.store, experts)
        got = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    with small_engine(tmp_path / "quantized", {"link_gbps": 20.0}) as llm:
        emulated = answers_at_budgets(llm, ("100%", "30%"), lambda: answers(llm))
    assert emulated == got
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
