"""While a CUDA graph is captured nothing is asked of the device by any other thread."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.small_model import make_experts, make_store
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
from tests.support.patience import becomes, ended
from tests.support.recorded_device import RecordedStore, RecordedStreams
from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.transfer import Reason, TransferError
from vllm_dymoe.transfer.cuda import PinnedDelivery, StagedDelivery
from vllm_dymoe.transfer.engine import TransferEngine
from vllm_dymoe.transfer.ticket import State

STORE = make_store(make_experts())
NBYTES = STORE.experts.formats[4].nbytes
KINDS = ("pinned", "staged", "disk")


class Disk(RecordedStore):
    """Never in the page cache: a caller that may not wait hands over to a thread."""

    def read_into(self, key, destination, projections=range(3), *, wait=True):
        if not wait:
            raise BlockingIOError("not in memory")
        super().read_into(key, destination, projections)


class Device:
    """An engine over deterministic threads, and a way to capture."""

    def __init__(self, kind, seed, restless=0.5):
        self.history = History()
        self.threads = DeterministicThreads(self.history, seed, restless)
        self.streams = RecordedStreams(self.history, self.threads.pause, lambda: True)
        if kind == "pinned":
            delivery = PinnedDelivery(STORE, self.streams, worth_a_copy=0)
            self.engine = TransferEngine(delivery, 1, eager=True, concurrency=self.threads)
        else:
            store = (Disk if kind == "disk" else RecordedStore)(STORE, self.history, self.threads.pause)
            buffers = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]
            delivery = StagedDelivery(store, self.streams, buffers, self.threads, worth_a_copy=0)
            self.engine = TransferEngine(delivery, 2, timeout=1.0, concurrency=self.threads)
        self.slots = []

    def submit(self, expert, reason):
        self.slots.append(torch.full((NBYTES,), 0xEE, dtype=torch.uint8))
        return self.engine.submit(BlobKey(0, expert, 4), self.slots[-1], reason)

    def capture(self, calls=5):
        """A piece of the model, whose calls take a while."""
        self.streams.capturing = True
        for _ in range(calls):
            self.threads.pause()
        self.streams.capturing = False


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 9))
def test_no_schedule_lets_a_thread_disturb_a_capture(kind, seed, restless, head_start):
    device = Device(kind, seed, restless)
    ahead = [device.submit(expert, Reason(1 + expert % 2)) for expert in range(3)]
    for _ in range(head_start):
        device.threads.pause()
    for first in (3, 4):  # vLLM captures once to learn how much memory it takes, and once again
        with device.engine.paused():
            for expert in (first, first + 1):
                device.capture()
                needed = device.submit(expert, Reason.DEMAND)  # between two pieces a layer is computed, as always
                device.engine.wait(needed, 2)
                device.engine.wait(needed)
                assert torch.equal(needed.destination, STORE.blob(needed.key))
            device.capture()
    assert device.streams.intruders == []
    for ticket in ahead:
        device.engine.wait(ticket)
        assert torch.equal(ticket.destination, STORE.blob(ticket.key))
    device.engine.close()
    assert device.history.races == []


def test_without_a_pause_some_schedule_does():
    """The test above can fail."""

    def disturbed(kind, seed):
        device = Device(kind, seed)
        for expert in range(3):
            device.submit(expert, Reason.PREFETCH)
        device.capture(20)
        device.engine.close()
        return bool(device.streams.intruders)

    for kind in KINDS:
        assert any(disturbed(kind, seed) for seed in range(20)), kind


def test_what_is_queued_goes_on_by_itself_afterwards():
    """On Python's own threads."""
    streams = RecordedStreams(History(), lambda: time.sleep(1e-3), lambda: True)
    engine = TransferEngine(PinnedDelivery(STORE, streams, worth_a_copy=0), 1, eager=True)
    slots = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(4)]
    begun, *others = (engine.submit(BlobKey(0, expert, 4), slot, Reason.PREFETCH) for expert, slot in enumerate(slots))
    assert becomes(lambda: begun.state is State.RUNNING)
    with engine.paused(), engine.paused():  # capturing and what it calls may both ask for it
        moved = engine.stats.bytes_moved[Reason.PREFETCH]
        streams.capturing = True
        time.sleep(0.05)
        streams.capturing = False
        assert engine.stats.bytes_moved[Reason.PREFETCH] == moved
        assert engine.cancel(others.pop()), "what is queued can still be taken back"
    assert all(ended(ticket) for ticket in (begun, *others))
    assert streams.intruders == []
    for slot, ticket in zip(slots, (begun, *others), strict=False):
        assert torch.equal(slot, STORE.blob(ticket.key))
    engine.close()


def test_a_read_that_does_not_end_is_no_reason_to_wait_for_ever():
    class Stuck(RecordedStore):
        gate = threading.Event()

        def read_into(self, *arguments, **named):
            self.gate.wait()
            super().read_into(*arguments, **named)

    history = History()
    streams = RecordedStreams(history, lambda: None, lambda: True)
    store = Stuck(STORE, history, lambda: None)
    buffers = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]
    engine = TransferEngine(StagedDelivery(store, streams, buffers), 1, timeout=0.05)
    ticket = engine.submit(BlobKey(0, 0, 4), torch.empty(NBYTES, dtype=torch.uint8), Reason.PREFETCH)
    assert becomes(lambda: ticket.state is State.RUNNING)
    with pytest.raises(TransferError, match=r"has not ended for 0\.05 seconds"), engine.paused():
        pytest.fail("captured beside a read that will ask for a copy")
    store.gate.set()
    assert ended(ticket), "the engine goes on"
    engine.close()
