"""Checkpoints that are quantized already, through the real engine.

The bytes of the high tier are the checkpoint's, the dense layers are vLLM's own, and the answers are those of vLLM with
the dequantized weights.
"""

import re
from dataclasses import replace

import pytest
import torch
import transformers

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, check_logprobs_close, equal_share, runtime_of
from tests.e2e.quantized import write_quantized
from tests.e2e.test_models import TOKENS, prompts, serve
from vllm_dymoe.kernels import dequantize, unpack
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.convert import Recipe, convert
from vllm_dymoe.residency.format import BlobKey

pytestmark = pytest.mark.engine

NAMES = {"w1": 0, "w3": 1, "w2": 2, "gate_proj": 0, "up_proj": 1, "down_proj": 2}


def place(name):
    """Layer, expert and projection that the name of a tensor means."""
    found = re.search(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.", name)
    return int(found[1]), int(found[2]), NAMES[found[3]]


def read(store, key, fmt, base=None):
    blob = torch.empty(fmt.nbytes, dtype=torch.uint8)
    store.read_into(key, blob)
    return fmt.view(blob, base)


def check_store(store, experts, bits):
    """Every code and every weight of the high tier is the checkpoint's."""
    fmt, base = store.experts.formats[bits], None
    for name, matrix in experts.items():
        layer, expert, projection = place(name)
        key = BlobKey(store.experts.layers.index(layer), expert, bits)
        if fmt.nested:
            base = read(store, replace(key, bits=bits // 2), fmt.base)
        packed = read(store, key, fmt, base)[projection]
        assert torch.equal(unpack(packed), matrix.codes), name
        assert torch.equal(dequantize(packed, fmt.dtype), matrix.weights()), name


@pytest.mark.parametrize(
    ("kind", "model"), [("awq", "mixtral"), ("gptq", "qwen3-moe"), ("compressed-tensors", "qwen3-moe")]
)
def test_a_quantized_checkpoint_is_served_with_its_own_numbers(tmp_path, kind, model):
    experts = write_quantized(ARCHITECTURES[model], kind, tmp_path, dense=True)
    with serve(tmp_path / "plain") as llm:
        want = answer(llm, prompts(), TOKENS)
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's build for processors without AVX-512 has no quantized dense layers")
    with serve(tmp_path / "quantized", {"lo": 2, "expert_budget": "50%"}) as llm:
        got = answer(llm, prompts(), TOKENS)
        runtime = runtime_of(llm)
        runtime.check_integrity()
        assert runtime.options.stored_bits == (4, 2)
        assert runtime.options.group_size == 32
        assert runtime.store.manifest.quantizer == f"{kind} checkpoint"  # the low version lies inside its codes
        check_store(runtime.store, experts, 4)
        assert "UnquantizedLinearMethod" not in llm.collective_rpc(dense_methods)[0]
    check_logprobs_close(got, want)
    assert equal_share(got, want) > 0.8
    if kind == "awq":
        convert(Checkpoint(tmp_path / "quantized"), tmp_path / "ours", Recipe(hi=4, lo=2, group_size=32))
        with serve(tmp_path / "ours", {"expert_budget": "25%"}) as llm:
            assert [a.tokens for a in answer(llm, prompts(), TOKENS)] == [a.tokens for a in got]
            assert "UnquantizedLinearMethod" not in llm.collective_rpc(dense_methods)[0]


def test_experts_in_the_order_of_their_activations_are_served_beside_dense_layers_of_16_bits(tmp_path):
    """Beside transformers with the dequantized weights, in float32 and over the same tokens."""
    experts = write_quantized(ARCHITECTURES["qwen3-moe"], "gptq-ordered", tmp_path, dense=False)
    with serve(tmp_path / "quantized", {"lo": 2, "expert_budget": "50%"}) as llm:
        got = answer(llm, prompts(), TOKENS)
        runtime = runtime_of(llm)
        runtime.check_integrity()
        assert [fmt.act_order for fmt in runtime.experts.formats.values()] == [True, True]
        check_store(runtime.store, experts, 4)
        assert llm.collective_rpc(dense_methods)[0] == {"UnquantizedLinearMethod"}
    # Float16 rounds logits of a size of 10 by 0.004; columns of another order change them by several.
    assert max(logprob_differences(tmp_path / "plain", got)) < 0.02


def logprob_differences(folder, answers):
    """By how much the log-probability of each token differs from what transformers gives it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differences = []
    for prompt, given in zip(prompts(), answers, strict=True):
        before = prompt["prompt_token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([before + given.tokens])).logits[0, len(before) - 1 : -1]
        for token, ours, theirs in zip(given.tokens, given.logprobs, logits.log_softmax(1), strict=True):
            differences.append(abs(ours[token] - float(theirs[token])))
    return differences


def dense_methods(worker):
    """Names of the methods of the attention's linear layers."""
    modules = worker.model_runner.model.named_modules()
    return {type(m.quant_method).__name__ for name, m in modules if name.endswith(("qkv_proj", "o_proj"))}
