"""``dense`` at FP8 through the real engine.

vLLM's own online quantization runs while the model loads, with CPU kernels.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.e2e.engines import engine, prompts
from vllm_dymoe.vllm_plugin import dense, dense_fp8

pytestmark = pytest.mark.engine

GPU = SimpleNamespace(is_cpu=lambda: False, has_device_capability=lambda least: least <= 90)


def answers(options):
    from vllm import SamplingParams

    with engine(dymoe={"high": 8, "expert_budget": "100%"} | options) as llm:
        model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        kinds = {
            name.rpartition(".")[2]: type(module.quant_method).__name__
            for name, module in model.named_modules()
            if getattr(module, "quant_method", None) is not None
        }
        sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
        found = llm.generate(prompts(), sampling, use_tqdm=False)
        return kinds, [{token: entry.logprob for token, entry in one.outputs[0].logprobs[0].items()} for one in found]


def test_attention_and_head_are_fp8_and_answers_stay_close(monkeypatch):
    _, exact = answers({})
    for module in (dense, dense_fp8):
        monkeypatch.setattr(module, "current_platform", GPU)
    kinds, found = answers({"dense": 8})
    assert kinds["qkv_proj"] == kinds["o_proj"] == "Fp8PtpcOnlineLinearMethod"
    assert kinds["gate"] == "UnquantizedLinearMethod", "a router keeps its 16 bits"
    off = [abs(one[token] - two[token]) for one, two in zip(exact, found, strict=True) for token in one.keys() & two]
    assert torch.tensor(off).mean() < 0.1
    same = sum(max(one, key=one.get) == max(two, key=two.get) for one, two in zip(exact, found, strict=True))
    assert same >= len(exact) - 2
    assert max(off) > 0
