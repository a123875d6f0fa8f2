"""While a CUDA graph is captured, no other thread calls the device.

tests/executor/test_schedules.py tries many schedules.
"""

import time

import pytest
import torch

from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.happens_before import History
from tests.support.patience import becomes, ended
from tests.support.recorded_device import RecordedStreams
from vllm_dymoe.cache.transfer import Reason, TransferError
from vllm_dymoe.cache.transfer.cuda import StreamDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.experts.format import SliceKey

STORE = make_store(make_experts())
NBYTES = STORE.experts.formats[4].nbytes


def test_what_is_queued_goes_on_by_itself_afterwards():
    streams = RecordedStreams(History(), lambda: time.sleep(1e-3), lambda: True)
    engine = TransferEngine(StreamDelivery(STORE, streams), 1, eager=True)
    slots = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(4)]
    begun, *others = (engine.submit(SliceKey(0, expert, 4), slot, Reason.PREFETCH) for expert, slot in enumerate(slots))
    assert becomes(lambda: begun.state is State.RUNNING)
    with engine.paused(), engine.paused():  # both the capture and a function that it calls may pause the engine
        moved = engine.stats.bytes_moved[Reason.PREFETCH]
        streams.capturing = True
        time.sleep(0.05)
        streams.capturing = False
        assert engine.stats.bytes_moved[Reason.PREFETCH] == moved
        assert engine.cancel(others.pop()), "what is queued can still be taken back"
    assert all(ended(ticket) for ticket in (begun, *others))
    assert streams.intruders == []
    for slot, ticket in zip(slots, (begun, *others), strict=False):
        assert torch.equal(slot, STORE.packed(ticket.key))
    engine.close()


def test_a_read_that_does_not_end_is_no_reason_to_wait_for_ever():
    streams = RecordedStreams(History(), lambda: None, lambda: True)
    store = FaultyStore(STORE, lambda number, key: "hang")
    buffers = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2)]
    engine = TransferEngine(StreamDelivery(store, streams, buffers), 1, timeout=0.05)
    ticket = engine.submit(SliceKey(0, 0, 4), torch.empty(NBYTES, dtype=torch.uint8), Reason.PREFETCH)
    assert becomes(lambda: ticket.state is State.RUNNING)
    with pytest.raises(TransferError, match=r"0\.05 seconds"), engine.paused():
        pytest.fail("captured beside a read that will ask for a copy")
    store.gate.set()
    assert ended(ticket), "the engine goes on"
    engine.close()
