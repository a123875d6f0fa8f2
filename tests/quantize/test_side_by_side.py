"""Work on all cores: order of results, one core per piece, bounded memory."""

import os
import threading

import pytest
import torch

from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.quantize import side_by_side
from vllm_dymoe.quantize.side_by_side import SideBySide


@pytest.fixture
def done():
    return []


@pytest.fixture
def pool(done):
    pool = SideBySide(lambda *piece: done.append(piece))
    yield pool
    pool.close()


def test_all_is_done_and_told_in_order(pool, done):
    worked = []
    for number in range(100):
        pool.submit(1, worked.append, number)
    pool.wait()
    assert done == [(number,) for number in range(100)]
    assert sorted(worked) == list(range(100))


def test_pieces_stay_on_one_core_and_the_caller_keeps_its_own():
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        pool = SideBySide(lambda: None)
        for _ in range(20):
            pool.submit(1, lambda: found.append((threading.current_thread(), torch.get_num_threads())))
        pool.wait()
        pool.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert {threads for _, threads in found} == {1}
    assert threading.current_thread() not in {thread for thread, _ in found}


def test_threads_leave_the_core_of_a_bound_caller():
    """vLLM's CPU worker binds each of its threads to a core of its own."""
    cores, found, free = os.sched_getaffinity(0), [], threading.Event()
    threading.Thread(target=free.wait).start()
    os.sched_setaffinity(0, {min(cores)})
    try:
        pool = SideBySide(lambda: None)
        pool.submit(1, lambda: found.append(os.sched_getaffinity(0)))
        pool.wait()
        pool.close()
    finally:
        os.sched_setaffinity(0, cores)
        free.set()
    assert found == [cores]


@pytest.mark.parametrize("number", [0, 2])
def test_threads_that_cannot_be_started_are_a_sentence_and_leave_no_thread(monkeypatch, number):
    """Otherwise they would wait for the others, also when the interpreter ends."""
    monkeypatch.setattr(side_by_side, "usable_cores", lambda cores: 3)
    before, threads, start = torch.get_num_threads(), [], threading.Thread.start

    def limited(thread):
        if len(threads) == number:
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(StoreError, match=r"takes 3 threads.*can't start new thread.*ulimit"):
            SideBySide(lambda: None)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert torch.get_num_threads() == before


def test_an_error_of_one_thread_ends_the_others(monkeypatch):
    monkeypatch.setattr(side_by_side, "usable_cores", lambda cores: 3)
    calls = []

    def refuse_once(*_):
        calls.append(threading.current_thread())
        if len(calls) == 3:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse_once)
    with pytest.raises(OSError, match="Invalid argument"):
        SideBySide(lambda: None)
    for thread in calls:
        thread.join(10)
    assert not any(thread.is_alive() for thread in calls)


def test_large_pieces_wait_for_one_another(pool, done):
    gate = threading.Event()
    pool.submit(side_by_side._MOST_BYTES, gate.wait)
    threading.Timer(0.05, gate.set).start()
    pool.submit(1, int)
    assert done == [()]


def test_an_error_is_raised_where_the_work_comes_from(pool, done):
    pool.submit(1, int)
    pool.submit(1, int, "no number")
    with pytest.raises(ValueError, match="no number"):
        pool.wait()
    assert done == [()]
