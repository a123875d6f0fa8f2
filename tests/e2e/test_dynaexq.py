"""Versions that move under a real engine: nothing waits, even for copies that never end."""

import threading
import time

import numpy as np
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
    runtime_of,
)
from tests.e2e.full_replays import replayed_steps
from vllm_dymoe.residency.rule import HIGH
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.vllm_adapter.worker import _runtime

pytestmark = pytest.mark.engine


def test_requests_end_with_the_right_tokens_whether_copies_hang_or_arrive(monkeypatch):
    """Versions that exclude each other move only when both of a pair are there, so that a copy that hangs changes
    nothing."""
    parameters = {"window_s": 0, "window_uses": 1, "link_share": 1.0, "margin": 0}
    options = {"hi": 16, "lo": 4, "expert_budget": "50%", "system": "dynaexq", "system_options": parameters}
    with engine(dymoe=options) as llm:
        runtime = runtime_of(llm)
        held = runtime.memory.table.tier.copy()
        assert 0 < (held == HIGH).sum() < held.size
        with monkeypatch.context() as still:
            still.setattr(runtime.serving, "migration", None)
            want = answer(llm, prompts()[:4])
        read, gate = runtime.store.read_into, threading.Event()

        def hang(*arguments, **named):
            gate.wait()
            read(*arguments, **named)

        with monkeypatch.context() as hanging:
            hanging.setattr(runtime.store, "read_into", hang)
            assert answer(llm, prompts()[:4]) == want
        stats = runtime.stats()
        assert (stats.misses, stats.moves["published"], stats.bytes_moved["demand"]) == (0, 0, 0)
        assert stats.moves["late"] > 0
        assert stats.moves["refused"] > 0, "copies that hang keep their slots"
        gate.set()

        for _ in range(3):
            answer(llm, prompts(), logprobs=None)
        runtime.check_integrity()
        stats = runtime.stats()
        assert stats.misses == 0
        assert stats.moves["published"] > 0
        assert stats.choices["hi"] > 0
        assert (runtime.memory.table.tier != held).any()


def test_replayed_steps_read_what_is_published_without_a_new_capture():
    """Whole decode steps that were captured before; eager ones with the same rows answer alike, to the last bit."""
    parameters = {"window_s": 0, "window_uses": 0.5, "link_share": 1.0, "margin": 0, "in_flight": 8}
    options = {"hi": 4, "lo": 2, "expert_budget": "70%", "system": "dynaexq", "system_options": parameters}
    options |= {"host_store": "pinned", "decisions": "device"}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
    with replayed_steps() as seen, engine(dymoe=options, enforce_eager=False, compilation_config=graphs) as llm:
        runtime = runtime_of(llm)
        tiers = runtime.memory.table.tier

        def frozen(replaying):
            seen.replaying = replaying
            with pytest.MonkeyPatch.context() as still:
                still.setattr(runtime.serving, "migration", None)
                return [answer(llm, prompts()[:batch], max_tokens=6) for batch in (1, 4)]

        want, before = frozen(False), tiers.copy()
        assert frozen(True) == want
        captures, replays = list(seen.captures), seen.replays
        for _ in range(3):
            answer(llm, prompts()[4:8], logprobs=None)
        stats = runtime.stats()
        assert stats.moves["published"] > 0
        assert stats.misses == 0
        assert (tiers != before).any()
        replayed, after = frozen(True), tiers.copy()
        assert frozen(False) == replayed
        assert replayed != want, "what was published is not read"
        assert (tiers == after).all()
        assert seen.captures == captures
        assert (sorted(captures), seen.moved) == ([1, 4], 0)
        assert seen.replays > replays
        runtime.check_integrity()


TWO = {"hi": 4, "lo": 2, "group_size": 32, "system": "dynaexq"}  # see test_parallel for groups of 32
FOLLOWING = {"window_s": 0, "window_uses": 1, "link_share": 1.0, "margin": 0}


def watch(worker):
    """Note the map of each step on a rank; copies of the second rank are slow."""
    runtime = _runtime(worker)
    worker.maps, begin, read = [], runtime.serving.begin_step, runtime.store.read_into

    def begin_step(phase):
        begin(phase)
        worker.maps.append(runtime.memory.table.tier.copy())

    def slowly(*arguments, **named):
        time.sleep(0.05)
        read(*arguments, **named)

    runtime.serving.begin_step = begin_step
    if worker.rank:
        runtime.store.read_into = slowly


def watched(worker):
    runtime = _runtime(worker)
    runtime.serving.migration.stop()
    runtime.serving.migration = None
    return np.array(worker.maps), runtime.memory.table.tier.copy()


def serve_two_ranks(log):
    """The maps of two ranks while versions move, and answers with the one at the end."""
    prepare_rank(log)
    options = TWO | {"expert_budget": "75%", "system_options": FOLLOWING}
    with engine(dymoe=options, distributed_executor_backend="mp", tensor_parallel_size=2) as llm:
        llm.collective_rpc(watch)
        answer(llm, prompts()[:8], logprobs=None, max_tokens=48)
        maps = llm.collective_rpc(watched)
        answers = answer(llm, prompts(), max_tokens=16)
        llm.collective_rpc("dymoe_check_integrity")
        return maps, answers, llm.collective_rpc("dymoe_stats")


@needs_two_cores
def test_two_ranks_publish_in_the_same_step_and_answer_like_one_with_their_map(tmp_path):
    maps, answers, stats = in_own_process(serve_two_ranks, tmp_path / "log")
    (one, held), (other, _) = maps
    assert np.array_equal(one, other)
    assert (np.diff(one, axis=0) != 0).any(), "nothing moved"
    assert [rank["misses"] for rank in stats] == [0, 0]
    with engine(dymoe=TWO | {"expert_budget": "100%"}) as llm:
        runtime = runtime_of(llm)
        runtime.serving.migration = None
        for place in np.argwhere(held != HIGH).tolist():
            runtime.memory.evict(*place, Tier.HI)
        assert np.array_equal(runtime.memory.table.tier, held)
        alone = answer(llm, prompts(), max_tokens=16)
    check_logprobs_close(answers, alone)
    assert equal_share(answers, alone) >= 0.95
