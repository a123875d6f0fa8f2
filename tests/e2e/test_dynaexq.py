"""Versions that move under a real engine: nothing waits, even for copies that never end."""

import threading

import pytest

from tests.e2e.engines import answer, engine, prompts, runtime_of
from vllm_dymoe.experts.residency import HIGH

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
            still.setattr(runtime, "_migration", None)
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
