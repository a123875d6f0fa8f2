"""The small-batch path in a real engine on a CPU: the same bits as the host path."""

import pytest
import torch

from tests.e2e.architectures import ARCHITECTURES
from tests.e2e.engines import answer, engine, prompts, random_prompts, server_of, small_engine
from tests.e2e.full_replays import replayed_steps
from tests.executor.device_planned import check_device_planned
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.trace.trace import Trace

pytestmark = pytest.mark.engine

BUDGETS = ("50%", "minimum")
OPTIONS = {
    "high": 4,
    "low": 2,
    "expert_budget": "25%",
    "host_store": "pinned",
    "policy": "dymoe",
    # Residency must not choose an expert's precision, or budgets could not be compared.
    "policy_options": {"retention": 0.5, "high_by": "depth", "reuse_high": False},
}
DEVICE = OPTIONS | {"planning": "device"}
TOKENS = 6


def served(llm, budget, batch):
    server = server_of(llm)
    server.resize(server.minimum_budget if budget == "minimum" else budget)
    llm.reset_prefix_cache()
    answers = answer(llm, prompts()[:batch], max_tokens=TOKENS)
    if server.small_batches is not None:
        check_device_planned(server)
    return answers


def test_the_device_computes_what_the_host_computes():
    batches = (3, SMALL_BATCH_ROWS)
    with engine(dymoe=OPTIONS) as llm:
        want = {batch: served(llm, "100%", batch) for batch in batches}
        planned = server_of(llm).stats().planned
    with engine(dymoe=DEVICE) as llm:
        server = server_of(llm)
        for budget in BUDGETS:
            server.reset_stats()
            for batch in batches:
                assert served(llm, budget, batch) == want[batch], (budget, batch)
            stats = server.stats()
            assert stats.planned == planned
            assert stats.hits + stats.misses == planned["high"] + planned["low"]
        assert int(server.cache.device_table.table.step.min()) > 0


def test_router_weights_that_multiply_inputs_are_planned_by_the_device(tmp_path):
    """Llama 4 has such weights.

    Misses go over an emulated card's link or to its CPU worker, and prompts are large batches.
    """
    folder, common = ARCHITECTURES["llama-4"].save(tmp_path / "model"), {"high": 4, "low": 0, "host_store": "pinned"}
    with small_engine(folder, common) as llm:
        want = answer(llm, random_prompts(), TOKENS)
    for misses in ("fetch", "compute"):
        with small_engine(folder, common | {"expert_budget": "30%", "link_gbps": 8.0, "misses": misses}) as llm:
            assert answer(llm, random_prompts(), TOKENS) == want, misses
            server = server_of(llm)
            assert server.small_batches is not None
            assert bool(server.stats().cpu_executed) == (misses == "compute")


def test_replayed_steps_decide_anew_with_nothing_of_the_host(tmp_path):
    """Replays follow changes of budget, precision and batch, without host code.

    The same graphs are replayed, and the trace contains every token.
    """
    options = DEVICE | {"high": 8, "trace": str(tmp_path)}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
    with replayed_steps() as seen, engine(dymoe=options, enforce_eager=False, compilation_config=graphs) as llm:
        server = server_of(llm)
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"

        def answers():
            found = []
            for budget, retention, batch in (("50%", 0.5, 1), ("minimum", 0.5, 3), ("50%", 1.0, 4), ("25%", 0.25, 3)):
                llm.collective_rpc("dymoe_precision", kwargs={"retention": retention})
                found.append(served(llm, budget, batch))
            return found

        def counts():
            stats = server.stats()
            server.reset_stats()
            return stats.planned, stats.hits, stats.misses, stats.evictions, stats.bytes_moved["demand"]

        server.reset_stats()
        want, counted = answers(), counts()
        seen.replaying = True
        assert answers() == want
        assert counts() == counted
        assert (sorted(seen.captures), seen.moved) == ([1, 4], 0)
        assert seen.replays == 4 * (TOKENS - 1) - len(seen.captures)
        (trace,) = llm.collective_rpc("dymoe_trace")
    recorded = Trace.load(tmp_path)
    assert len(recorded.experts) == trace["tokens"]
    half = trace["tokens"] // 2
    assert torch.equal(recorded.experts[:half], recorded.experts[half:])
    assert torch.equal(recorded.fates[:half], recorded.fates[half:])
    assert {0, 1, 2} <= set(recorded.fates[~recorded.prefill].flatten().tolist())
    assert torch.equal(recorded.prefill[:half], recorded.prefill[half:])
    assert (~recorded.prefill[half:]).sum() == (1 + 3 + 4 + 3) * (TOKENS - 1)
