"""One engine with vLLM's second model runner, and everything that the runners do differently.

Run by ``test_model_runner_v2``. By hand: ``pytest -p tests.support.triton_on_cpu tests/e2e/model_runner_v2.py``.

Left out: speculation with n-grams, and a sampler that is warmed up with every feature there is. Both fail in vLLM's own
kernels under Triton's interpreter ("mask has unsupported dtype", "All-NaN slice"); they have nothing of ours in them,
and what they would show of drafted tokens is shown in ``vllm_adapter/test_step`` and ``test_prompts``.
"""

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu import warmup

from tests.e2e.engines import WatchedSystem, answer, answers_at_budgets, engine, prompts, runtime_of
from tests.e2e.padding import check_padding
from tests.e2e.test_faults import FaultyReads, check_failed, finish, finish_with_fault, start, step
from tests.e2e.test_traces import Watched
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.vllm_adapter.observers import DOMAIN

LAYERS, STEP = 8, 64  # MoE layers; tokens that a step may have
LONG = prompts()[0] * 12  # takes two steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def llm(folder):
    options = {
        "hi": 4,
        "lo": 2,
        "system": "dymoe",
        "system_options": {"retention": 0.5, "high_by": "depth", "heavy_share": 0.2},
        "expert_budget": "50%",
        "trace": str(folder),
    }
    settings = {"max_num_batched_tokens": STEP, "max_num_seqs": 4, "enable_prefix_caching": True}
    with engine(dymoe=options, **settings) as llm:
        yield llm
        runtime_of(llm).check_integrity()


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def stats_of(llm):
    (stats,) = llm.collective_rpc("dymoe_stats")
    return stats


def tokens_recorded(llm):
    (report,) = llm.collective_rpc("dymoe_trace")
    return report["tokens"]


def set_retention(llm, retention):
    llm.collective_rpc("dymoe_precision", kwargs={"retention": retention})


def warm_up(llm):
    """What vLLM runs before the first request: on a GPU from 0.26 on, on a CPU from 0.33 on, and here by hand."""
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


def test_nothing_is_made_of_what_vllm_computes_to_warm_up(llm, monkeypatch):
    """Neither before the first request nor later is it counted, recorded, learned from or foreseen."""
    runtime = runtime_of(llm)
    predictor, heard = runtime.predictor.predictor, []
    observe = predictor.observe
    monkeypatch.setattr(predictor, "observe", lambda routing: (heard.append(routing.layer), observe(routing)))
    for served in (False, True):
        if served:
            answer(llm, prompts()[:1], max_tokens=3, logprobs=None)
        assert bool(heard) == served
        before, recorded, told = stats_of(llm), tokens_recorded(llm), len(heard)
        watched = runtime.serving.system = WatchedSystem(runtime.system)
        warm_up(llm)
        runtime.serving.system = watched._system
        assert len(watched.seen) >= 3 * LAYERS
        assert all(routing.prompt is None for routing, _ in watched.seen), "a prompt that was not sent"
        after = stats_of(llm)
        assert {**after, "resident_experts": {}} == {**before, "resident_experts": {}}
        assert (before["hits"] > 0) == served
        assert tokens_recorded(llm) == recorded
        assert len(heard) == told


def test_the_same_tokens_and_the_same_bits_at_every_budget_and_counts_that_add_up(llm):
    runtime = runtime_of(llm)
    set_retention(llm, 1.0)
    llm.collective_rpc("dymoe_reset_stats")
    answers_at_budgets(llm, ("100%", "25%"), lambda: answer(llm, prompts()[:2], max_tokens=6))
    stats = stats_of(llm)
    assert stats["evictions"] > 0
    assert stats["hits"] + stats["misses"] == stats["planned"]["hi"] > 0
    assert stats["peak_expert_bytes"] <= stats["budget_bytes"] == runtime.budget.limit
    (resized,) = llm.collective_rpc("dymoe_resize", args=("50%",))
    assert sum(resized["slots"].values()) == sum(pool.count for pool in runtime.memory.pools.values())


def test_the_policy_sees_the_prompts_of_each_step_and_their_heavy_hitters(llm):
    set_retention(llm, 0.5)
    runtime = runtime_of(llm)
    watched = runtime.serving.system = WatchedSystem(runtime.system)
    llm.reset_prefix_cache()
    start(llm, [1, 2], max_tokens=4)
    step(llm, 2)
    start(llm, [LONG], max_tokens=2)
    finish(llm)
    runtime.serving.system = watched._system
    kinds = set()
    for routing, _ in watched.seen:
        prompt = routing.prompt
        kinds.add("decode" if prompt is None else "mixed" if prompt.mixed else "prompts")
        if prompt is not None:
            assert len(prompt.rows) == len(prompt.heavy) == len(routing.ids) <= STEP
            assert not (prompt.heavy & ~prompt.rows).any()
            assert 0 < int(prompt.heavy.sum()) < int(prompt.rows.sum())
            assert prompt.mixed == (not prompt.rows.all())
    assert kinds == {"decode", "mixed", "prompts"}
    assert {tier.value for _, plan in watched.seen for tier in plan.values()} == {"hi", "lo"}
    marked = [routing.prompt.heavy for routing, _ in watched.seen if routing.prompt is not None][:LAYERS]
    assert any(not torch.equal(marked[0], other) for other in marked[1:]), "each layer has its own attention"


def test_a_fault_fails_the_requests_of_its_step_and_the_next_are_answered(llm):
    runtime = runtime_of(llm)
    want = answer(llm, prompts()[:1], max_tokens=4, logprobs=None)[0].tokens
    before = tokens_recorded(llm)
    reads = runtime.store.read_into = FaultyReads(runtime.store)
    try:
        start(llm, [0])
        assert not step(llm, 2)
        start(llm, [1])  # one request decodes, another one's prompt is read
        good = tokens_recorded(llm) - before
        runtime.memory.clear()
        reads.arm(3)
        done = finish_with_fault(llm, reads)
    finally:
        del runtime.store.read_into
    assert len(done) == 2
    check_failed(done, "layer 3 is on fire")
    assert tokens_recorded(llm) - before == good, "a step that failed is not recorded"
    runtime.check_integrity()
    assert answer(llm, prompts()[:1], max_tokens=4, logprobs=None)[0].tokens == want


def test_a_trace_has_every_token_of_every_request_once(llm, folder):
    observation, watched = worker_of(llm).vllm_config.quant_config.loaded_model().observation, Watched()
    llm.reset_prefix_cache()
    before = tokens_recorded(llm)
    observation.join(watched)
    lengths = {}
    for number, prompt in enumerate((LONG, prompts()[3])):  # the second one comes while the first is read
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={DOMAIN: f"domain {number}"})
        llm.llm_engine.add_request(f"traced {number}", prompt, sampling)
        step(llm)
    for output in finish(llm):
        lengths[output.request_id] = len(output.prompt_token_ids)
    observation.leave(watched)
    after = tokens_recorded(llm)
    trace = Trace.load(folder).select(torch.arange(before, after))
    for layer in range(LAYERS):
        ids = torch.cat([ids for at, _, _, ids in watched.layers if at == layer])
        assert torch.equal(trace.experts[:, layer], ids.byte())
    for number, rows in enumerate(trace.by_request()):
        length = lengths[f"traced {number}"]
        assert trace.domain[int(trace.request[rows[0]])] == f"domain {number}"
        assert trace.position[rows].tolist() == list(range(length + 3))
        assert trace.prefill[rows].tolist() == [True] * length + [False] * 3
    assert max(lengths.values()) > STEP, "no prompt had to be cut"


def test_rows_that_fill_up_a_batch_change_nothing(llm):
    check_padding(llm, max_tokens=3)
