"""The tools of other tests find races, deadlocks and host code in captured steps."""

import threading

import pytest
import torch

from tests.support.deterministic_threads import DeadlockError, DeterministicThreads
from tests.support.happens_before import History
from tests.support.no_host import HostInStepError, NoHost

SEEDS = range(30)


@pytest.fixture
def history():
    return History()


@pytest.fixture
def memory(history):
    memory = torch.zeros(8, dtype=torch.uint8)
    history.watch(memory, "slot 0", (slice(0, 4), slice(4, 8)))
    return memory


def test_a_read_has_to_follow_the_write(history, memory):
    history.write("copy", memory)
    history.read("compute", memory[4:])
    assert history.races == ["the compute stream reads bytes 4 to 8 of slot 0 while the copy stream may still write it"]
    history.follow(threading.current_thread(), history.now("copy"))
    history.follow("compute", history.now(threading.current_thread()))  # order is transitive
    history.read("compute", memory)
    assert len(history.races) == 1


def test_an_event_orders_what_lay_before_it_only(history, memory):
    history.write("copy", memory[:4])
    event = history.now("copy")
    history.write("copy", memory[4:])
    history.follow("compute", event)
    history.read("compute", memory[:4])
    assert not history.races
    history.read("compute", memory[4:])
    assert len(history.races) == 1


def test_a_write_has_to_follow_every_reader_and_the_last_writer(history, memory):
    history.write("copy", memory)
    for reader in ("one", "other"):
        history.follow(reader, history.now("copy"))
        history.read(reader, memory[:4])
    history.follow("copy", history.now("one"))
    history.write("copy", memory[:4])
    assert history.races == ["the copy stream writes bytes 0 to 4 of slot 0 while the other stream may still read it"]
    history.write("third", memory[4:])
    assert "third stream writes bytes 4 to 8 of slot 0 while the copy stream may still write it" in history.races[-1]


def run(scheduler, *targets):
    threads = [scheduler.Thread(target=does, name=f"{i}", daemon=True) for i, does in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return threads


def count(seed, locked):
    """Let two threads increment a number three times each; return lost updates, races.

    ``locked`` tells whether they hold a lock. The third value is the trace of the chosen threads.
    """
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

    run(scheduler, add, add)
    return 6 - int(number), len(history.races), scheduler.trace


def test_a_lost_update_and_its_race_are_found_and_a_lock_orders():
    lost, races, traces = zip(*(count(seed, locked=False) for seed in SEEDS), strict=True)
    assert max(lost) > 0
    assert max(races) > 0
    assert count(7, locked=False) == count(7, locked=False), "the same seed is another run"
    assert len(set(map(tuple, traces))) > 10
    assert {count(seed, locked=True)[:2] for seed in SEEDS} == {(0, 0)}


def test_a_deadlock_is_found():
    def cross(seed):
        scheduler = DeterministicThreads(History(), seed)
        locks = [scheduler.Lock(), scheduler.Lock()]

        def take(first, second):
            with locks[first], locks[second]:
                pass

        try:
            run(scheduler, lambda: take(0, 1), lambda: take(1, 0))
        except DeadlockError:
            return True
        return False

    assert 0 < sum(map(cross, SEEDS)) < len(SEEDS)


def test_a_condition_wakes_a_waiting_thread_and_time_passes_only_when_no_thread_can_go_on():
    scheduler = DeterministicThreads(History(), 3)
    condition = scheduler.Condition(scheduler.Lock())
    ready = []

    def produce():
        with condition:
            ready.append(1)
            condition.notify()

    with condition:
        assert not condition.wait_for(lambda: ready, timeout=1), "there is no other thread"
    thread = scheduler.Thread(target=produce, name="producer", daemon=True)
    thread.start()
    with condition:
        assert condition.wait_for(lambda: ready, timeout=1)
    thread.join(timeout=1)


def on_device():
    return torch.empty(4, 2, dtype=torch.int64, device="meta")


def test_work_that_stays_on_the_device_passes():
    with NoHost():
        values = on_device()
        total = (values * 2 + 1).sum(0)
        torch.where(total > 0, total, 0)
        values.copy_(torch.empty_like(values)).masked_fill_(values < 0, 3)
        torch.zeros(2, device="meta").index_add_(0, values[:, 0], torch.empty(4, device="meta"))


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (lambda values: values.max().item(), "waits for the device"),
        (lambda values: bool(values.any()), "waits for the device"),
        (lambda values: values.nonzero(), "waits for the device"),
        (lambda values: values[values > 0], "by a mask waits for the device"),
        (lambda values: values.unique(), "waits for the device"),
        (lambda values: values.cpu(), "moves values between cpu and meta"),
        (lambda values: values.copy_(torch.zeros(4, 2, dtype=torch.int64)), "moves values between cpu and meta"),
        (lambda values: torch.zeros(4).copy_(values[:, 0]), "moves values between cpu and meta"),
        (lambda values: torch.arange(3).sum().item(), "_local_scalar_dense"),
    ],
)
def test_what_waits_for_a_device_is_found(planted, sentence):
    with pytest.raises(HostInStepError, match=sentence), NoHost():
        planted(on_device())
