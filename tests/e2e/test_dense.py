"""The option ``dense`` through the real engine."""

import pytest

from tests.e2e.engines import answer, engine, equal_share, prompts, runtime_of
from vllm_dymoe.kernels import native

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.load() is None, reason="the native library was not built"),
]


def tokens(answers):
    return [a.tokens for a in answers]


def test_dense_layers_of_eight_bits_answer_like_those_of_sixteen_and_no_budget_changes_that():
    with engine(dymoe={"expert_budget": "100%"}) as llm:
        want = answer(llm, prompts()[:8], logprobs=None)
    with engine(dymoe={"expert_budget": "100%", "dense": 8}, enforce_eager=False) as llm:
        got = answer(llm, prompts()[:8], logprobs=None)
        runtime_of(llm).resize("25%")
        assert tokens(answer(llm, prompts()[:8], logprobs=None)) == tokens(got)
        model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        packed = sum(hasattr(module, "packed") for module in model.modules())
        assert packed == 2 * 8 + 1, "attention's two of each layer, and the head"
    assert equal_share(got, want) > 0.8
