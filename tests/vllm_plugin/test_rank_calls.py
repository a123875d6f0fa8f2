"""Calls of all ranks, with vLLM's own executor and client."""

import asyncio
import inspect
from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from vllm_dymoe.vllm_plugin.patches import apply_patches
from vllm_dymoe.vllm_plugin.rank_calls import call_ranks


class Queue(deque):
    def dequeue(self, timeout=None, **more):
        return self.popleft()


class Calls:
    """The queue to the workers, which answer at once.

    A call's arguments are the ranks that refuse it.
    """

    def __init__(self, answers):
        self.answers = answers

    def enqueue(self, call):
        method, refusing, _, asked = call
        status = WorkerProc.ResponseStatus
        for rank, queue in enumerate(self.answers):
            if asked in (None, rank):
                queue.append((status.FAILURE if rank in refusing else status.SUCCESS, f"{method} of rank {rank}"))


@pytest.fixture
def executor():
    apply_patches()
    executor = object.__new__(MultiprocExecutor)
    executor.response_mqs = [Queue(), Queue(), Queue()]
    executor.rpc_broadcast_mq = Calls(executor.response_mqs)
    executor.futures_queue, executor.is_failed = deque(), False
    return executor


@pytest.mark.parametrize("refusing", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_refused_call_leaves_no_replies_for_the_next_call_or_step(executor, refusing):
    with pytest.raises(RuntimeError, match=f"change of rank {refusing[0]}"):
        executor.collective_rpc("change", args=refusing)
    assert executor.collective_rpc("ask") == [f"ask of rank {rank}" for rank in range(3)]
    assert executor.collective_rpc("step", unique_reply_rank=1) == "step of rank 1"
    later = executor.collective_rpc("step", unique_reply_rank=2, non_block=True)
    assert executor.collective_rpc("ask") == [f"ask of rank {rank}" for rank in range(3)]
    assert later.result() == "step of rank 2"
    assert executor.response_mqs == [deque()] * 3


def test_a_call_that_reaches_no_rank_waits_for_none(executor):
    executor.is_failed = True
    with pytest.raises(RuntimeError, match="failed"):
        executor.collective_rpc("ask")


def test_the_ranks_of_all_engines_answer():
    class Client:
        core_engines = (b"0", b"1")

        async def _call_utility_async(self, method, *arguments, engine):
            assert (method, arguments) == ("collective_rpc", ("ask", 5, (), {"what": 1}))
            return [engine + rank for rank in (b"a", b"b")]

    parallel = SimpleNamespace(data_parallel_size=2)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), engine_core=Client())
    assert asyncio.run(call_ranks(engine, "ask", {"what": 1}, timeout=5)) == [b"0a", b"0b", b"1a", b"1b"]
    assert "engine" in inspect.signature(AsyncMPClient._call_utility_async).parameters
