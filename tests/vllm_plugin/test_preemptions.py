"""What the plugin proposes when vLLM's full KV cache makes it preempt requests."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from tests.small_model import make_experts
from vllm_dymoe.cache.budget import minimum_budget
from vllm_dymoe.options import Options
from vllm_dymoe.policies import make_policy
from vllm_dymoe.vllm_plugin import preemptions
from vllm_dymoe.vllm_plugin.preemptions import Preemptions, proposal

GIB = 2**30


def test_the_proposal_has_exact_numbers():
    said = proposal(4, 2, 4 * GIB, 10 * GIB, GIB, own_memory=True)
    assert "2 of 6 requests" in said
    assert f"dymoe_resize({8 * GIB}), from {10 * GIB}" in said
    assert f"expert_budget {8 * GIB}" in said
    assert "--max-num-seqs 4" in said


def test_a_cpu_has_no_budget_to_spare():
    assert "VLLM_CPU_KVCACHE_SPACE=6;" in proposal(4, 2, 4 * GIB, 10 * GIB, GIB, own_memory=False)


@given(some.integers(1, 64), some.integers(1, 64), some.integers(1, 1 << 40), some.integers(1, 1 << 40))
def test_what_is_proposed_is_feasible_and_holds_all_requests(running, preempted, kv_cache, limit):
    least = limit // 3 + 1
    said = proposal(running, preempted, kv_cache, limit, least, own_memory=True)
    if "dymoe_resize" in said:
        proposed = int(said.partition("dymoe_resize(")[2].partition(")")[0])
        assert least <= proposed < limit
        assert (kv_cache + limit - proposed) * running >= kv_cache * (running + preempted)
    else:
        assert "cannot spare" in said


@pytest.fixture
def server():
    options, experts = Options(), make_experts()
    plan = SimpleNamespace(limit=1 << 20, workspace_bytes=0)
    policy = make_policy(options)
    assert minimum_budget(experts, options, policy, 0) < plan.limit
    return SimpleNamespace(slot_plan=plan, experts=experts, options=options, policy=policy, device=torch.device("cuda"))


def test_it_is_said_once_for_each_budget(server, monkeypatch):
    said = []
    monkeypatch.setattr(preemptions.logger, "warning", lambda form, sentence: said.append(sentence))
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=1 << 18)] * 2))
    watch = Preemptions()

    def step(*preempted):
        watch.see(SimpleNamespace(preempted_req_ids=set(preempted), num_scheduled_tokens={"a": 1}), runner, server)

    step()
    assert said == []
    step("b")
    step("c")
    assert len(said) == 1
    assert f"dymoe_resize({(1 << 20) - (1 << 19)})" in said[0]
    server.slot_plan.limit = 1 << 21
    step("b")
    assert len(said) == 2
    watch.see(SimpleNamespace(num_scheduled_tokens={}), runner, server)  # a scheduler without the list of preemptions
