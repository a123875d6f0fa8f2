"""Reads that never end: waiters give up, slots stay taken, and no thread is lost."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.small_model import make_experts, make_store
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.faulty_store import FaultyStore
from tests.support.happens_before import History
from tests.support.patience import becomes, ended
from tests.support.recorded_device import RecordedStore
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.experts.format import EVERY_PROJECTION, SliceKey

STORE = make_store(make_experts())
KEYS = [SliceKey(layer, expert, 4) for layer in range(2) for expert in range(6)]
TIMEOUT = 0.25  # of reads that never end; the others have to end in time on a busy machine, too


def disk_with(faults):
    """Return a disk with a fault for each of the given numbers of reads.

    All other reads wait for the disk and succeed. A read whose fault is None does not even wait.
    """
    return FaultyStore(STORE, lambda number, key: faults.get(number, "cold"))


def slot():
    return torch.zeros_like(STORE.packed(KEYS[0]))


def engine_over(disk, threads=0, timeout=TIMEOUT):
    return TransferEngine(CpuDelivery(disk), threads, timeout=timeout)


def transfer_threads():
    return [thread for thread in threading.enumerate() if thread.name == "dymoe-transfer"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = len(transfer_threads())
    yield
    assert becomes(lambda: len(transfer_threads()) == before)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_read_that_does_not_end_is_given_up_with_a_sentence(threads):
    disk = disk_with({0: "hang"})
    engine = engine_over(disk, threads)
    stuck = engine.submit(KEYS[7], slot(), Reason.DEMAND)
    sentence = r"expert 1 of layer 2 at 4 bits .* transfer_timeout_s"
    with pytest.raises(TransferError, match=sentence):
        engine.wait(stuck)
    assert not engine.settle(stuck), "it still writes its slot"
    well = engine.submit(KEYS[2], slot(), Reason.DEMAND)
    engine.wait(well)
    assert torch.equal(well.destination, STORE.packed(KEYS[2]))
    disk.gate.set()
    assert ended(stuck)
    assert engine.settle(stuck)
    engine.close()


@pytest.mark.parametrize("seed", range(30))
def test_the_thread_of_a_piece_that_does_not_end_is_replaced_by_its_like(seed):
    """A prediction whose second projection does not come, and then is in demand."""
    threads = DeterministicThreads(History(), seed)
    hanging = []

    class Disk(RecordedStore):
        def read_into(self, key, destination, projections=EVERY_PROJECTION, *, wait=True):
            if not wait:
                raise BlockingIOError("not in memory")
            if key == KEYS[0] and 1 in projections:
                hanging.append(True)
                threads.block(lambda: not hanging)
            super().read_into(key, destination, projections)

    delivery = CpuDelivery(Disk(STORE, threads.history, threads.pause))
    engine = TransferEngine(delivery, 1, timeout=1.0, concurrency=threads)
    with pytest.raises(TransferError, match="took longer"):
        engine.wait(engine.submit(KEYS[0], slot(), Reason.PREFETCH))
    hanging.clear()
    ahead = engine.submit(KEYS[1], slot(), Reason.PREFETCH)
    assert threads.block(lambda: ahead.ended, limit=True), "the queue is not served any more"
    engine.close()


def test_what_is_in_memory_is_read_by_the_waiting_thread():
    disk = disk_with({0: None})
    engine = engine_over(disk)
    for key in KEYS[:2]:
        engine.wait(engine.submit(key, slot(), Reason.DEMAND))
    (first, _), (second, _) = disk.reads
    assert first is threading.current_thread() is not second, "a disk is never waited for outside of a thread"
    engine.close()


def test_a_transfer_that_could_not_begin_in_time_gives_its_slot_back_at_once():
    disk = disk_with({0: "hang"})
    engine = engine_over(disk, threads=1)
    running = engine.submit(KEYS[0], slot(), Reason.PREFETCH)
    assert becomes(lambda: running.state is State.RUNNING)
    waiting = engine.submit(KEYS[1], slot(), Reason.PREFETCH)
    assert engine.cancel(waiting)
    assert engine.settle(waiting)
    assert not engine.settle(running)
    disk.gate.set()
    engine.close()


def test_closing_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("vllm_dymoe.cache.transfer.workers._SECONDS_TO_CLOSE", 0.1)
    disk = disk_with({0: "hang"})
    engine = engine_over(disk, threads=1)
    running = engine.submit(KEYS[0], slot(), Reason.PREFETCH)
    assert becomes(lambda: running.state is State.RUNNING)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 5
    disk.gate.set()


def test_without_a_limit_it_is_waited_for():
    disk = disk_with({0: "hang"})
    engine = engine_over(disk, threads=1, timeout=None)
    ticket = engine.submit(KEYS[0], slot(), Reason.PREFETCH)
    assert becomes(lambda: ticket.state is State.RUNNING)
    threading.Timer(3 * TIMEOUT, disk.gate.set).start()
    engine.wait(ticket)
    assert torch.equal(ticket.destination, STORE.packed(KEYS[0]))
    engine.close()


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.integers(0, 20), st.sampled_from(["fail", "hang", None]), max_size=6),
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(list(Reason))), min_size=1, max_size=16),
    st.integers(0, 2),
)
def test_every_ticket_ends_and_every_slot_comes_back(faults, wanted, threads):
    """Random reads have random faults.

    What arrives is right, failures are reported, and at the end no write is in progress.
    """
    disk = disk_with(faults)
    engine = engine_over(disk, threads, timeout=0.02)
    tickets = [engine.submit(key, slot(), reason) for key, reason in wanted]
    orphaned = []
    for ticket in tickets:
        try:
            engine.wait(ticket)
        except TransferError:
            assert ticket.state is not State.DONE or ticket.orphaned
            if not engine.settle(ticket):
                orphaned.append(ticket)
        else:
            assert torch.equal(ticket.destination, STORE.packed(ticket.key))
    assert all(ticket.orphaned for ticket in orphaned)
    disk.gate.set()
    for ticket in orphaned:
        assert ended(ticket)
        assert engine.settle(ticket)
    assert all(ticket.ended for ticket in tickets)
    engine.close()
    assert not engine._workers._threads or all(not thread.is_alive() for thread in engine._workers._threads)
