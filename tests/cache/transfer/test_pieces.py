"""A device's computation waits for all copies of an expert."""

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
def test_computation_waits_for_the_copy_once(memory_store, kind):
    """From pinned memory it is enqueued at once.

    From a file, whoever waits for it enqueues it.
    """
    device = Device(kind, memory_store)
    ticket = device.engine.submit(KEY, device.slot, Reason.DEMAND)
    assert (device.streams.copies, device.streams.waits) == (1 if kind == "pinned" else 0, 0)
    if kind == "pinned":
        assert device.races(0), "nobody has waited yet"
    for _ in range(2):
        device.engine.wait(ticket)
    assert not any(map(device.races, range(3)))
    assert (device.streams.copies, device.streams.waits) == (1, 1)
    assert torch.equal(device.slot, memory_store.packed(KEY))


def test_what_was_prefetched_in_part_is_followed_by_the_rest_in_one_copy(memory_store):
    device = Device("pinned", memory_store)
    ticket = device.engine.submit(KEY, device.slot, Reason.PREFETCH, projections=1)
    device.engine._run(ticket, device.engine._queue._begin(ticket))  # as a transfer thread would
    assert device.streams.copies == 1
    device.engine.wait(ticket)
    assert not any(map(device.races, range(3)))
    assert (device.streams.copies, device.streams.waits) == (2, 2)
    assert torch.equal(device.slot, memory_store.packed(KEY))
