"""Migration of versions in a real engine: no step waits for a copy that hangs."""

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
    server_of,
)
from tests.e2e.full_replays import replayed_steps
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.vllm_plugin.worker import _server

pytestmark = pytest.mark.engine


def test_requests_end_with_the_right_tokens_whether_copies_hang_or_arrive(monkeypatch):
    """Copies that never end do not change any answer.

    Of two versions that exclude each other, neither moves before both copies have arrived.
    """
    # A copy that is older than a window is abandoned, so windows have to be longer than copies take.
    parameters = {"window_s": 0.02, "window_uses": 1, "link_share": 1.0, "margin": 0}
    options = {"high": 16, "low": 4, "expert_budget": "50%", "policy": "dynaexq", "policy_options": parameters}
    with engine(dymoe=options) as llm:
        server = server_of(llm)
        held = server.cache.table.precision.copy()
        assert 0 < (held == HIGH).sum() < held.size
        with monkeypatch.context() as still:
            still.setattr(server.host_planned, "migration", None)
            want = answer(llm, prompts()[:4])
        read, gate = server.store.read_into, threading.Event()

        def hang(*arguments, **named):
            gate.wait()
            read(*arguments, **named)

        with monkeypatch.context() as hanging:
            hanging.setattr(server.store, "read_into", hang)
            assert answer(llm, prompts()[:4]) == want
        stats = server.stats()
        assert (stats.misses, stats.moves["published"], stats.bytes_moved["demand"]) == (0, 0, 0)
        assert stats.moves["late"] > 0
        assert stats.moves["refused"] > 0, "copies that hang keep their slots"
        gate.set()

        rounds = 0
        while rounds < 3 or (rounds < 30 and not server.stats().moves["published"]):
            answer(llm, prompts(), logprobs=None)
            rounds += 1
        server.check_integrity()
        stats = server.stats()
        assert stats.misses == 0
        assert stats.moves["published"] > 0
        assert stats.choices["high"] > 0
        assert (server.cache.table.precision != held).any()


def test_replayed_steps_read_what_is_published_without_a_new_capture():
    """Captured decode steps give the same bits as eager ones after a migration."""
    parameters = {"window_s": 0, "window_uses": 0.5, "link_share": 1.0, "margin": 0, "in_flight": 8}
    options = {"high": 4, "low": 2, "expert_budget": "70%", "policy": "dynaexq", "policy_options": parameters}
    options |= {"host_store": "pinned", "planning": "device"}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
    with replayed_steps() as seen, engine(dymoe=options, enforce_eager=False, compilation_config=graphs) as llm:
        server = server_of(llm)
        precisions = server.cache.table.precision

        def frozen(replaying):
            seen.replaying = replaying
            with pytest.MonkeyPatch.context() as still:
                still.setattr(server.host_planned, "migration", None)
                return [answer(llm, prompts()[:batch], max_tokens=6) for batch in (1, 4)]

        want, before = frozen(False), precisions.copy()
        assert frozen(True) == want
        captures, replays = list(seen.captures), seen.replays
        for _ in range(3):
            answer(llm, prompts()[4:8], logprobs=None)
        stats = server.stats()
        assert stats.moves["published"] > 0
        assert stats.misses == 0
        assert (precisions != before).any()
        replayed, after = frozen(True), precisions.copy()
        assert frozen(False) == replayed
        assert replayed != want, "what was published is not read"
        assert (precisions == after).all()
        assert seen.captures == captures
        assert (sorted(captures), seen.moved) == ([1, 4], 0)
        assert seen.replays > replays
        server.check_integrity()


TWO = {"high": 4, "low": 2, "group_size": 32, "policy": "dynaexq"}  # see test_parallel for groups of 32
FOLLOWING = {"window_s": 0, "window_uses": 1, "link_share": 1.0, "margin": 0}


def watch(worker):
    """Record a rank's precision map at each step; slow down the second rank's copies."""
    server = _server(worker)
    worker.maps, begin, read = [], server.host_planned.begin_step, server.store.read_into

    def begin_step(phase):
        begin(phase)
        worker.maps.append(server.cache.table.precision.copy())

    def slowly(*arguments, **named):
        time.sleep(0.05)
        read(*arguments, **named)

    server.host_planned.begin_step = begin_step
    if worker.rank:
        server.store.read_into = slowly


def watched(worker):
    server = _server(worker)
    server.host_planned.migration.stop()
    server.host_planned.migration = None
    return np.array(worker.maps), server.cache.table.precision.copy()


def serve_two_ranks(log):
    """Return two ranks' precision maps and answers.

    A map for each step while versions migrate, and the answers with the final map.
    """
    prepare_rank(log)
    options = TWO | {"expert_budget": "75%", "policy_options": FOLLOWING}
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
        server = server_of(llm)
        server.host_planned.migration = None
        for place in np.argwhere(held != HIGH).tolist():
            server.cache.evict(*place, Precision.HIGH)
        assert np.array_equal(server.cache.table.precision, held)
        alone = answer(llm, prompts(), max_tokens=16)
    check_logprobs_close(answers, alone)
    assert equal_share(answers, alone) >= 0.95
