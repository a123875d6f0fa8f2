"""Foreseeing through the real engine: the gates are vLLM's, guesses are good, and only time depends on them."""

import json

import pytest
import torch

import vllm_dymoe
from tests.e2e.engines import answer, engine, gates_compared, prompts, recorded_layers, runtime_of
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.tuner import Heop, Setting

pytestmark = pytest.mark.engine

BUDGET = "25%"


@pytest.fixture(scope="module")
def llm():
    # A link on which the shipped model's experts take about a millisecond each: there is something to hide.
    options = {"hi": 4, "system": "firm", "expert_budget": BUDGET, "link_gbps": 0.03}
    with engine(dymoe=options) as llm:
        yield llm


def answered(llm):
    """Tokens and every layer's output, from an empty cache."""
    runtime = runtime_of(llm)
    runtime.resize(BUDGET)
    runtime.reset_stats()
    with recorded_layers(runtime) as layers:
        answers = [answer(llm, [text], max_tokens=24)[0] for text in prompts()[:3]]
    runtime.check_integrity()
    return [a.tokens for a in answers], layers


def test_gates_choose_what_vllm_chooses(llm):
    with gates_compared(llm) as shares:
        answer(llm, prompts()[:4], max_tokens=4)
    assert len(shares) >= 4 * 8
    assert min(shares) == 1


def test_what_is_foreseen_changes_no_bit_and_is_mostly_right(llm):
    runtime = runtime_of(llm)
    meeting = runtime.predictor
    setting = meeting.predictor._tuner.setting(1)
    tuner = Heop(8, setting, Setting(8, 3), update_every=2, rounds=4)  # settles within the test
    meeting.predictor._tuner = tuner
    tokens, layers = answered(llm)
    stats = runtime.stats()
    # Measured: 0.74 for the meeting while it is tuned, 0.77 for the next gate. By chance an eighth would be right.
    assert stats.predictions["right"] / stats.predictions["named"] > 0.6
    assert stats.prefetches["useful"] + stats.prefetches["late"] > stats.prefetches["wasted"]
    assert tuner.settled

    runtime.serving.predictor = type(meeting)(NextGate(meeting.predictor._gates, top_k=4))
    next_tokens, next_layers = answered(llm)
    stats = runtime.stats()
    assert stats.predictions["right"] / stats.predictions["wanted"] > 0.6
    assert stats.prefetches["useful"] > 0

    runtime.serving.predictor = None
    plain_tokens, plain_layers = answered(llm)
    assert sum(runtime.stats().prefetches.values()) == 0
    assert tokens == next_tokens == plain_tokens
    for outputs in (layers, next_layers):
        assert all(torch.equal(a, b) for a, b in zip(outputs, plain_layers, strict=True))
    runtime.serving.predictor = meeting


def test_a_timeline_of_an_llm(llm, tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(FileNotFoundError), vllm_dymoe.timeline(llm, tmp_path / "missing" / "trace.json"):
        pass
    with vllm_dymoe.timeline(llm, path):
        answer(llm, prompts()[:1], max_tokens=4)
    events = json.loads(path.read_text())["traceEvents"]
    layers = [event for event in events if event.get("cat") == "layer"]
    assert [event["args"]["phase"] for event in layers] == ["prefill"] * 8 + ["decode"] * 3 * 8
    assert {"compute", "demand", "predict"} <= {event.get("cat") for event in events}
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
