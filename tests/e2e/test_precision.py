"""The policy `dymoe` in a real engine: decisions, transfers, and live changes."""

import pytest
import torch
from vllm import SamplingParams

from tests.e2e import engines
from tests.e2e.engines import (
    answer,
    answers_at_budgets,
    engine,
    equal_share,
    prompts,
    resize,
    server_of,
)
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.policies.schedule import Schedule

pytestmark = pytest.mark.engine

LAYERS, TOP_K = 8, 4
WATCHED = {"retention": 0.75, "high_by": "depth", "heavy_share": 0.2}
DYMOE = {"high": 4, "low": 2, "policy": "dymoe", "policy_options": WATCHED, "expert_budget": "50%"}


@pytest.fixture(scope="module")
def llm():
    with engine(dymoe=DYMOE, enable_prefix_caching=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _as_at_start(request):
    """Reset the prefix cache, the precision and the budget to those at the start."""
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.reset_prefix_cache()
        resize(llm, "50%")
        change(llm, high=4, low=2, **WATCHED)


def change(llm, **changes):
    (answer,) = llm.collective_rpc("dymoe_precision", kwargs=changes)
    return answer


def stats_of(llm):
    (stats,) = llm.collective_rpc("dymoe_stats")
    return stats


def watch(llm):
    return engines.watch(server_of(llm)).seen


def test_precisions_follow_the_schedule_in_both_phases(llm):
    seen = watch(llm)
    llm.collective_rpc("dymoe_reset_stats")
    answer(llm, prompts()[:1], max_tokens=8)
    schedule = Schedule(0.75)
    decoded = [(routing, plan) for routing, plan in seen if routing.prompt is None]
    read = [(routing, plan) for routing, plan in seen if routing.prompt is not None]
    assert len(read) == LAYERS
    assert len(decoded) == 7 * LAYERS
    for routing, plan in seen:
        high = {expert for expert, precision in plan.items() if precision is Precision.HIGH}
        assert len(high) == schedule.critical(routing.layer, LAYERS, len(plan))
    for routing, plan in decoded:
        weights = dict(zip(routing.ids[0].tolist(), routing.weights[0].tolist(), strict=True))
        assert max(weights, key=weights.get) in {
            expert for expert, precision in plan.items() if precision is Precision.HIGH
        }
    for routing, _ in read:
        tokens = routing.weights.shape[0]
        assert routing.prompt.rows.all()
        assert int(routing.prompt.heavy.sum()) == -(-tokens // 5), "a fifth of them, rounded up"
    heavy = [routing.prompt.heavy for routing, _ in read]
    assert any(not torch.equal(heavy[0], other) for other in heavy[1:]), "each layer has its own attention"
    stats = stats_of(llm)
    assert stats["planned"] == {
        precision: sum(list(plan.values()).count(Precision(precision)) for _, plan in seen)
        for precision in ("high", "low", "skipped")
    }
    assert stats["peak_expert_bytes"] <= stats["budget_bytes"]


def test_steps_of_many_requests_mix_both_phases(llm):
    seen, requests = watch(llm), llm.llm_engine
    for number, prompt in enumerate(prompts()[:6]):  # each arrives while the earlier ones are decoded
        requests.add_request(f"mixed {number}", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        requests.step()
        requests.step()
    while requests.has_unfinished_requests():
        requests.step()
    kinds = {
        "decode" if routing.prompt is None else "mixed" if routing.prompt.mixed else "prompts" for routing, _ in seen
    }
    assert kinds == {"decode", "mixed", "prompts"}
    server_of(llm).check_integrity()


def test_precision_changes_while_requests_are_served(llm):
    server, requests = server_of(llm), llm.llm_engine
    limit = server.budget.limit
    for number, changes in enumerate(
        (
            {"retention": 1.0},
            {"retention": 0.75},
            {"retention": 0.5},
            {"low": 0},
            {"high": 2, "low": 0, "retention": 1.0},
            {"high": 4, "low": 2},
        )
    ):
        requests.add_request(f"{number}", prompts()[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        for _ in range(8):
            requests.step()
        now = change(llm, **changes)  # in the middle of a request
        llm.collective_rpc("dymoe_reset_stats")
        while requests.has_unfinished_requests():
            finished = requests.step()
        assert len(finished[0].outputs[0].token_ids) == 24
        stats = stats_of(llm)
        assert stats["budget_bytes"] == limit
        assert stats["peak_expert_bytes"] <= limit
        planned = stats["planned"]
        assert (planned["high"] > 0, planned["low"] > 0, planned["skipped"] > 0) == (
            True,
            now["low"] > 0 and now["policy_options"]["retention"] < 1,
            now["low"] == 0 and now["policy_options"]["retention"] < 1,
        )
        formats, slots = server.experts.formats, stats["slots"]
        assert slots["high"] * formats[now["high"]].nbytes + slots.get("low", 0) * formats[2].nbytes <= limit
        assert stats["hits"] + stats["misses"] == planned["high"] + planned["low"], "what is skipped asks for no bytes"
        server.check_integrity()


def test_four_bits_are_the_same_at_every_budget_and_two_bits_still_speak(llm):
    change(llm, retention=1.0)
    high = answers_at_budgets(llm, ("100%", "25%", "minimum"), lambda: answer(llm, prompts()[:8]))
    change(llm, retention=0)
    server = server_of(llm)
    server.resize("25%")
    server.reset_stats()
    low, stats = answer(llm, prompts()[:4]), server.stats()
    # Of each expert at most its two-bit version is moved. Reads that bypass the page cache prefetch some projections.
    fetched = (stats.misses - stats.cpu_executed) * server.experts.formats[2].nbytes
    assert stats.bytes_moved["demand"] <= fetched <= sum(stats.bytes_moved.values())
    if stats.bytes_moved["prefetch"] == 0:
        assert stats.bytes_moved["demand"] == fetched
    likely = sum(t in position for a in low for t, position in zip(a.tokens, a.logprobs, strict=True))
    assert likely == 4 * 32
    assert equal_share(low, high[:4]) < 1
