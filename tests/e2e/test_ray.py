"""Two ranks started by Ray answer like one.

A killed rank ends the engine, and a restart finds the store.
"""

import os
import signal
import time

import pytest

from tests.e2e.engines import (
    answer,
    check_logprobs_close,
    engine,
    equal_share,
    in_own_process,
    needs_two_cores,
    prepare_rank,
    prompts,
)

pytest.importorskip("ray", reason="ray is not installed (pip install ray), which starts these ranks")
pytestmark = [pytest.mark.engine, needs_two_cores]

OPTIONS = {"high": 16, "expert_budget": "25%", "policy_options": {"look_ahead": 0}}
TOKENS = 12


def serve(log, folder, kill):
    """Return two ranks' answers, and seconds until a killed rank ends the engine."""
    from tests.e2e import ray_on_cpu

    prepare_rank(log)
    os.environ["DYMOE_STORE_DIR"] = str(folder)
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "ray"}
    settings["worker_extension_cls"] = f"{ray_on_cpu.__name__}.RayWorker"
    with ray_on_cpu.cluster(), engine(dymoe=OPTIONS, **settings) as llm:
        result = {"answers": answer(llm, prompts()[:6], max_tokens=TOKENS)}
        llm.collective_rpc("dymoe_check_integrity")
        result["stats"] = llm.collective_rpc("dymoe_stats")
        processes, result["experts"] = zip(*llm.collective_rpc("process"), strict=True)
        if kill:
            os.kill(processes[1], signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="cancelled"):
                answer(llm, prompts()[:1], max_tokens=TOKENS)
            result["seconds"] = time.monotonic() - begin
    return result


def test_ray_s_ranks_answer_as_one_and_a_killed_one_ends_the_engine(tmp_path):
    with engine(dymoe=OPTIONS | {"expert_budget": "100%"}) as llm:
        alone = answer(llm, prompts()[:6], max_tokens=TOKENS)
    names = ("killed", "again")
    runs = [in_own_process(serve, tmp_path / name, tmp_path / "stores", name == "killed") for name in names]
    for run in runs:
        check_logprobs_close(run["answers"], alone)
        assert equal_share(run["answers"], alone) >= 0.95
        assert run["experts"] == (16, 16)
        for stats in run["stats"]:
            assert stats["hits"] > 0
            assert stats["misses"] > 0
            assert stats["peak_expert_bytes"] <= stats["budget_bytes"]
    assert runs[0]["answers"] == runs[1]["answers"]
    said = [(tmp_path / name).read_text() for name in names]
    assert [log.count("the experts are packed already") for log in said] == [0, 2]
    assert runs[0]["seconds"] < 60
    assert "died unexpectedly" in said[0]
