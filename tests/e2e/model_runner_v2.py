"""One engine with vLLM's second model runner: its own tests, and the first one's.

Run by ``test_model_runner_v2``. By hand: ``pytest -p tests.support.triton_on_cpu tests/e2e/model_runner_v2.py``.

Two tests are left out: speculation with n-grams, and a sampler warmed up with all features. Both fail in vLLM's own
kernels under Triton's interpreter ("mask has unsupported dtype", "All-NaN slice"), which the plugin does not touch.
``vllm_plugin/test_rank_server`` and ``test_prompts`` cover drafted tokens.
"""

import pytest
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu import warmup

from tests.e2e.engines import answer, answers_at_budgets, engine, prompts, server_of, watch
from tests.e2e.test_precision import DYMOE, LAYERS, WATCHED, _as_at_start, change, stats_of  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def llm(folder):
    # Residency must not choose an expert's precision where answers are compared.
    policy = {"policy_options": WATCHED | {"reuse_high": False}}
    options = DYMOE | policy | {"misses": "fetch", "trace": {"folder": str(folder), "inputs": True}}
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "enable_prefix_caching": True}
    with engine(dymoe=options, **settings) as llm:
        yield llm
        server_of(llm).check_integrity()


@pytest.fixture
def want(llm):
    """Return tokens with every expert at high precision.

    Prompt tokens that come from the prefix cache would not vote for their experts' precision again.
    """
    change(llm, retention=1.0)
    return [a.tokens for a in answer(llm, prompts()[:6], max_tokens=12)]


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def tokens_recorded(llm):
    (report,) = llm.collective_rpc("dymoe_trace")
    return report["tokens"]


def warm_up(llm):
    """Run vLLM's dummy batches, as vLLM does before the first request.

    It does so on GPUs since 0.26 and on CPUs since 0.33.
    """
    worker = worker_of(llm)
    runs = []
    original = worker.model_runner.execute_model

    def execute_model(*arguments, **others):
        runs.append(arguments[0].total_num_scheduled_tokens)
        return original(*arguments, **others)

    worker.model_runner.execute_model = execute_model
    try:
        made_up = worker.model_runner, worker.execute_model, worker.sample_tokens
        assert warmup.run_mixed_prefill_decode_warmup(*made_up, num_tokens=20)
        worker.execute_dummy_batch()
    finally:
        del worker.model_runner.execute_model
    assert runs == [2, 20, 0, 1]


def test_it_is_the_second_runner(llm):
    assert type(worker_of(llm).model_runner) is CPUModelRunner
    assert worker_of(llm).use_v2_model_runner


def test_nothing_is_made_of_what_vllm_computes_to_warm_up(llm):
    """vLLM's dummy batches are not counted, not recorded and not learned from.

    On a CPU they ask no predictor either.
    """
    server = server_of(llm)
    assert server.predictor is None
    for served in (False, True):
        if served:
            answer(llm, prompts()[:1], max_tokens=3, logprobs=None)
        before, recorded = stats_of(llm), tokens_recorded(llm)
        watched = watch(server)
        warm_up(llm)
        server.serve(server.options, watched._policy)
        assert len(watched.seen) >= 2 * LAYERS  # dummy batches reach the policy, without tokens of this engine
        assert all(routing.prompt is None for routing, _ in watched.seen), "a prompt that was not sent"
        after = stats_of(llm)
        assert {**after, "resident_experts": {}} == {**before, "resident_experts": {}}
        assert (before["hits"] > 0) == served
        assert tokens_recorded(llm) == recorded


def test_the_same_tokens_and_the_same_bits_at_every_budget_and_counts_that_add_up(llm):
    server = server_of(llm)
    change(llm, retention=1.0)
    llm.collective_rpc("dymoe_reset_stats")
    answers_at_budgets(llm, ("100%", "25%"), lambda: answer(llm, prompts()[:2], max_tokens=6))
    stats = stats_of(llm)
    assert stats["evictions"] > 0
    assert stats["hits"] + stats["misses"] == stats["planned"]["high"] > 0
    assert stats["peak_expert_bytes"] <= stats["budget_bytes"] == server.budget.limit
    (resized,) = llm.collective_rpc("dymoe_resize", args=("50%",))
    assert sum(resized["slots"].values()) == sum(pool.count for pool in server.cache.pools.values())


# The first runner's tests hold here, too. They come last, because the first test above needs an engine that has served
# no request.
from tests.e2e.test_faults import (  # noqa: E402
    reads,  # noqa: F401
    test_a_fault_in_any_layer_fails_the_requests_of_its_step,  # noqa: F401
)
from tests.e2e.test_precision import (  # noqa: E402
    test_precisions_follow_the_schedule_in_both_phases,  # noqa: F401
    test_steps_of_many_requests_mix_both_phases,  # noqa: F401
)
