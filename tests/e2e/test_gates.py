"""A router that is more than its gate, in a real engine: nobody goes by the gate, and the answers are the same."""

import functools

import pytest
from vllm.model_executor.models import qwen3_moe

from tests.e2e.engines import answer, engine, prompts, runtime_of
from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.vllm_adapter import gates

pytestmark = pytest.mark.engine

ODD = 5  # the layer with such a router


def runners_up(hidden_states, gating_output, topk, renormalize):
    """Takes the experts behind the best one."""
    weights, ids = gating_output.float().softmax(-1).topk(topk + 1)
    return weights[:, 1:] / weights[:, 1:].sum(-1, keepdim=True), ids[:, 1:].int()


@pytest.fixture
def odd_router(monkeypatch):
    name = "FusedMoEFactory" if hasattr(qwen3_moe, "FusedMoEFactory") else "FusedMoE"
    make = getattr(qwen3_moe, name)

    @functools.wraps(make)
    def made(*args, prefix, **settings):
        own = {"custom_routing_function": runners_up} if f".layers.{ODD}." in prefix else {}
        return make(*args, prefix=prefix, **settings, **own)

    monkeypatch.setattr(qwen3_moe, name, made)


def test_a_router_that_is_more_than_its_gate_is_served_without_the_gate(odd_router, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(gates.logger, "warning", lambda sentence, *values: said.append(sentence % values))
    options = {"hi": 4, "expert_budget": "25%", "link_gbps": 0.03}
    with engine(dymoe=options | {"trace": {"folder": str(tmp_path), "inputs": True}}) as llm:
        runtime = runtime_of(llm)
        by_gates = runtime.predictor
        assert by_gates is not None
        first = [a.tokens for a in answer(llm, prompts()[:3], max_tokens=12)]
        runtime.check_integrity()

        # The layers before it went by their gates once, in the step that told.
        assert runtime.predictor is None
        named = by_gates.stats.named
        assert named > 0
        (sentence,) = said
        assert sentence.startswith(
            'vllm-dymoe: system "exact" fetches nothing ahead, because the gate that was found for '
            f"model.layers.{ODD}.mlp.experts makes only "
        )
        assert sentence.endswith("% of vLLM's choices; experts are fetched when their router names them.")

        runtime.resize("100%")
        assert [a.tokens for a in answer(llm, prompts()[:3], max_tokens=12)] == first
        assert by_gates.stats.named == named
        (report,) = llm.collective_rpc("dymoe_trace")
    trace = Trace.load(tmp_path)
    assert trace.num_tokens == report["tokens"] == trace.in_order().numel()
    assert trace.num_requests == 6
    assert trace.next_gate is None
    assert statistics.activation_similarity(trace) is not None
