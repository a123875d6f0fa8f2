"""Computation waits only for copies of projections that it is about to read."""

import threading

import pytest
import torch

from tests.support.happens_before import History
from tests.support.memory_writer import staged
from tests.support.recorded_device import COMPUTATION, RecordedStreams
from vllm_dymoe.cache.transfer import Reason
from vllm_dymoe.cache.transfer.cuda import StreamDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.experts.format import SliceKey

KEY = SliceKey(1, 3, 4)


class Waits(RecordedStreams):
    """Counts the waits that the computing stream enqueues."""

    copies = waits = 0

    def copy(self, source, destination, *, urgent, after):
        self.copies += 1
        return super().copy(source, destination, urgent=urgent, after=after)

    def computation_waits(self, event):
        self.waits += 1
        super().computation_waits(event)


class Device:
    def __init__(self, kind, store):
        self.history = History()
        self.streams = Waits(self.history, lambda: None, lambda: True)
        if kind == "pinned":
            self.engine = TransferEngine(StreamDelivery(store, self.streams), 0, eager=True)
        else:
            buffers = [torch.empty(1 << 16, dtype=torch.uint8) for _ in range(2)]
            self.engine = TransferEngine(StreamDelivery(staged(store), self.streams, buffers), 0)
        fmt = store.experts.formats[4]
        self.sections = fmt.sections
        self.slot = torch.full((fmt.nbytes,), 0xEE, dtype=torch.uint8)
        self.history.watch(self.slot, "the slot", fmt.sections)

    def races(self, projection):
        self.history.follow(COMPUTATION, self.history.now(threading.current_thread()))
        before = len(self.history.races)
        self.history.read(COMPUTATION, self.slot[self.sections[projection]])
        return len(self.history.races) > before


@pytest.mark.parametrize("kind", ["pinned", "staged"])
def test_gate_and_up_do_not_wait_for_the_copy_of_down(memory_store, kind):
    """From pinned memory both copies are enqueued at once.

    From a file, gate and up are copied before down is read.
    """
    device = Device(kind, memory_store)
    ticket = device.engine.submit(KEY, device.slot, Reason.DEMAND)
    assert (device.streams.copies, device.streams.waits) == (2 if kind == "pinned" else 0, 0)
    device.engine.wait(ticket, 2)
    assert not device.races(0)
    assert not device.races(1)
    if kind == "pinned":
        assert device.races(2), "computation stands behind a copy that it does not read"
    else:
        assert bool((device.slot[device.sections[2]] == 0xEE).all())
    for _ in range(2):
        device.engine.wait(ticket, 3)
    assert not device.races(2)
    assert device.streams.waits == 2, "each copy is waited for once"
    assert torch.equal(device.slot, memory_store.packed(KEY))


def test_what_was_prefetched_is_followed_as_far_as_it_is_read(memory_store):
    device = Device("pinned", memory_store)
    ticket = device.engine.submit(KEY, device.slot, Reason.PREFETCH, projections=1)
    device.engine._run(ticket, device.engine._queue._begin(ticket))  # as a transfer thread would
    device.engine.wait(ticket, 1)
    assert not device.races(0)
    assert device.races(1)
    assert device.streams.copies == 3, "gate ahead; then up; then down"
    device.engine.wait(ticket)
    assert not device.races(1)
    assert not device.races(2)
