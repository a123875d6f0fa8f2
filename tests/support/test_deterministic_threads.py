"""Deterministic threads find what real threads hide, and find it again with the same seed."""

import threading

import pytest
import torch

from tests.support.deterministic_threads import DeadlockError, DeterministicThreads
from tests.support.happens_before import History

SEEDS = range(30)


def count(seed, locked):
    """Two threads add to a number three times each, with or without a lock; what is lost, and the races."""
    history, number = History(), torch.zeros(1)
    history.watch(number, "the number", [slice(0, 4)])
    scheduler = DeterministicThreads(history, seed)
    lock = scheduler.Lock()

    def step():
        me = threading.current_thread()
        history.read(me, number)
        before = number.clone()
        scheduler.pause()
        history.write(me, number)
        number.copy_(before + 1)

    def add():
        for _ in range(3):
            if locked:
                with lock:
                    step()
            else:
                step()

    threads = [scheduler.Thread(target=add, name=f"adder {i}", daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 6 - int(number), len(history.races), scheduler.trace


def test_a_lost_update_and_its_race_are_found():
    results = [count(seed, locked=False) for seed in SEEDS]
    assert max(lost for lost, _, _ in results) > 0
    assert max(races for _, races, _ in results) > 0


def test_a_lock_orders():
    assert {count(seed, locked=True)[:2] for seed in SEEDS} == {(0, 0)}


def test_the_same_seed_is_the_same_run():
    assert count(7, locked=False) == count(7, locked=False)
    assert len({tuple(count(seed, locked=False)[2]) for seed in SEEDS}) > 10


def test_a_deadlock_is_found():
    def cross(seed):
        scheduler = DeterministicThreads(History(), seed)
        locks = [scheduler.Lock(), scheduler.Lock()]

        def take(first, second):
            with locks[first], locks[second]:
                pass

        threads = [scheduler.Thread(target=lambda i=i: take(i, 1 - i), name=f"{i}", daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    stuck = 0
    for seed in SEEDS:
        try:
            cross(seed)
        except DeadlockError:
            stuck += 1
    assert 0 < stuck < len(SEEDS)


def test_a_condition_wakes_whoever_waits_and_time_passes_only_when_nobody_can_go_on():
    scheduler = DeterministicThreads(History(), 3)
    condition = scheduler.Condition(scheduler.Lock())
    ready = []

    def produce():
        with condition:
            ready.append(1)
            condition.notify()

    with condition:
        assert not condition.wait_for(lambda: ready, timeout=1), "nobody is there to make it ready"
    thread = scheduler.Thread(target=produce, name="producer", daemon=True)
    thread.start()
    with condition:
        assert condition.wait_for(lambda: ready, timeout=1), "somebody is"
    thread.join(timeout=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_lets_the_others_go_on():
    scheduler = DeterministicThreads(History(), 0)

    def fail():
        raise ValueError("on purpose")

    thread = scheduler.Thread(target=fail, name="failing", daemon=True)
    thread.start()
    thread.join()
    assert not thread.is_alive()
