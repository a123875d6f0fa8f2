"""One suite for all transfer engines, and for CUDA's where there is a device."""

import itertools
import threading
import time
import weakref

import pytest
import torch

from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.happens_before import History
from tests.support.memory_writer import staged
from tests.support.patience import becomes, ended
from tests.support.recorded_device import COMPUTATION, RecordedStreams
from vllm_dymoe.cache.transfer import Reason, make_engine
from vllm_dymoe.cache.transfer.cuda import CudaStreams, StreamDelivery
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.experts.format import SliceKey

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class DiskReads(CpuDelivery):
    """Reads that wait for a disk, so that demanded fetches involve threads."""

    occupies_cores = False


class Harness:
    def __init__(self, kind, store):
        self.device, self.history, self.slots = CPU, None, []
        if kind == "inline":
            self.engine = make_engine(store, CPU, io_threads=0, largest_slice=0)
        elif kind == "threads":
            self.engine = make_engine(store, CPU, io_threads=2, largest_slice=0)
        elif kind.startswith("cuda"):
            self.device = torch.device("cuda")
            streams = CudaStreams(self.device)
        else:
            self.history = History()
            streams = RecordedStreams(self.history, lambda: None, lambda: True)
        buffers = [torch.empty(1 << 16, dtype=torch.uint8, pin_memory=kind.startswith("cuda")) for _ in range(2)]
        if kind.endswith("pinned"):
            self.engine = TransferEngine(StreamDelivery(store, streams), 0, eager=True)
        elif kind.endswith("staged"):
            # Python's own locks record no history; tests/executor/test_schedules.py tests several threads.
            threads = 2 if kind.startswith("cuda") else 0
            self.engine = TransferEngine(StreamDelivery(staged(store), streams, buffers), threads)

    def slot(self, nbytes):
        slot = torch.full((nbytes,), 0xEE, dtype=torch.uint8, device=self.device)
        if self.history:
            self.history.watch(slot, f"slot {len(self.slots)}", [slice(0, nbytes)])
        self.slots.append(slot)  # so that no later one gets its address
        return slot

    def read(self, slot):
        if self.history:
            self.history.follow(COMPUTATION, self.history.now(threading.current_thread()))
            self.history.read(COMPUTATION, slot)
            assert self.history.races == []
        return slot.cpu().clone()


KINDS = [
    "inline",
    "threads",
    "recorded-pinned",
    "recorded-staged",
    pytest.param("cuda-pinned", marks=needs_cuda),
    pytest.param("cuda-staged", marks=needs_cuda),
]


@pytest.fixture(params=KINDS)
def harness(request, memory_store):
    harness = Harness(request.param, memory_store)
    yield harness
    harness.engine.close()


def packed(store, key):
    return store.packed(key).clone()


def test_many_transfers_of_all_reasons_arrive_once(harness, memory_store):
    tickets = []
    for expert in range(6):
        key = SliceKey(expert // 3, expert, 4 if expert % 2 else 2)
        slot = harness.slot(packed(memory_store, key).numel())
        tickets.append((harness.engine.submit(key, slot, Reason(expert % 3)), slot, key))
    for ticket, slot, key in tickets:
        harness.engine.wait(ticket)
        assert torch.equal(harness.read(slot), packed(memory_store, key))
        harness.engine.wait(ticket)  # a second user of the same version waits for the copy, too
    stats = harness.engine.stats
    assert sum(stats.bytes_moved.values()) == sum(slot.numel() for _, slot, _ in tickets)
    assert sum(stats.transfers.values()) == 6
    assert stats.transfers[Reason.DEMAND] >= 2


def test_bytes_count_for_the_reason_that_moved_them(memory_store):
    """Two projections were prefetched, and the third was fetched on demand."""
    engine = TransferEngine(CpuDelivery(memory_store), threads=1)
    key = SliceKey(0, 1, 4)
    gate, up, down = (section.stop - section.start for section in memory_store.experts.formats[4].sections)
    slot = torch.full((gate + up + down,), 0xEE, dtype=torch.uint8)
    ticket = engine.submit(key, slot, Reason.PREFETCH, projections=2)
    assert becomes(lambda: ticket.state is State.RESTING)
    assert torch.equal(slot[: gate + up], memory_store.packed(key)[: gate + up])
    assert bool((slot[gate + up :] == 0xEE).all()), "the third was not asked for"
    assert engine.stats.bytes_moved[Reason.PREFETCH] == gate + up
    engine.wait(ticket)
    assert torch.equal(slot, memory_store.packed(key))
    assert engine.stats.bytes_moved == {Reason.DEMAND: down, Reason.PREFETCH: gate + up, Reason.MIGRATION: 0}
    assert engine.stats.transfers == {Reason.DEMAND: 1, Reason.PREFETCH: 0, Reason.MIGRATION: 0}
    engine.close()


def test_a_prefetch_is_taken_back_at_the_next_projection(memory_store):
    store = FaultyStore(memory_store, lambda number, key: "hang")
    engine = TransferEngine(CpuDelivery(store), threads=1)
    slot = torch.empty_like(memory_store.packed(SliceKey(0, 0, 4)))
    ticket = engine.submit(SliceKey(0, 0, 4), slot, Reason.PREFETCH)
    assert becomes(lambda: ticket.state is State.RUNNING)
    assert not engine.cancel(ticket), "its first projection is moving"
    assert not ticket.ended
    store.gate.set()
    assert engine.settle(ticket)
    assert (ticket.state, ticket.arrived, len(store.reads)) == (State.CANCELLED, 1, 1)
    engine.close()


def test_on_a_device_a_prefetched_projection_is_issued_when_the_copies_before_it_have_ended(memory_store):
    log, events = [], []  # keep the events, so that each has an address of its own

    class Streams(RecordedStreams):
        def copy(self, source, destination, *, urgent, after):
            event = super().copy(source, destination, urgent=urgent, after=after)
            events.append(event)
            log.append(("urgent" if urgent else "background", id(event)))
            return event

        def synchronize(self, event):
            log.append(("ended", id(event)))

    engine = TransferEngine(StreamDelivery(memory_store, Streams(History(), lambda: None, lambda: True)), 1, eager=True)
    slots = [torch.empty_like(memory_store.packed(SliceKey(0, 0, 4))) for _ in range(2)]
    demand = engine.submit(SliceKey(0, 0, 4), slots[0], Reason.DEMAND)
    assert demand.state is State.DONE, "enqueued by the call"
    assert ended(engine.submit(SliceKey(0, 1, 4), slots[1], Reason.PREFETCH))
    copies = [entry for entry in log if entry[0] != "ended"]
    assert [stream for stream, _ in copies] == ["urgent"] + ["background"] * 3
    for earlier, later in itertools.pairwise(copies):
        between = log[log.index(earlier) : log.index(later)]
        assert ("ended", copies[0][1]) in between, "the demand transfer's copy"
        assert earlier is copies[0] or ("ended", earlier[1]) in between, "the projection before"
    engine.close()


def test_where_reads_take_cores_no_thread_competes_with_the_waiting_one(memory_store):
    store = FaultyStore(memory_store)
    engine = TransferEngine(CpuDelivery(store), threads=1)
    slots = [torch.empty_like(memory_store.packed(SliceKey(0, 0, 4))) for _ in range(2)]
    demands = [engine.submit(SliceKey(0, e, 4), slot, Reason.DEMAND) for e, slot in enumerate(slots)]
    time.sleep(0.05)
    assert [demand.state for demand in demands] == [State.PENDING] * 2
    for e in (1, 0):
        engine.wait(demands[e])
        assert torch.equal(slots[e], memory_store.packed(SliceKey(0, e, 4)))
    assert [key.expert for _, key in store.reads] == [1, 0]
    engine.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_what_has_arrived_is_not_remembered(memory_store, threads):
    engine = TransferEngine(CpuDelivery(memory_store), threads, timeout=10)
    slot = torch.empty_like(memory_store.packed(SliceKey(0, 0, 4)))
    for expert in range(6):
        engine.wait(engine.submit(SliceKey(0, expert, 4), slot, Reason.DEMAND))
    assert becomes(lambda: not engine._queue._pending), "a thread takes out what others have run when its turn comes"
    engine.close()


def test_a_thread_holds_no_slot_of_a_transfer_that_has_ended(memory_store):
    """Otherwise the pool before a resize would stay in memory until the next read."""
    engine = TransferEngine(CpuDelivery(memory_store), threads=1, timeout=10)
    slot = torch.empty_like(memory_store.packed(SliceKey(0, 0, 4)))
    held = weakref.ref(slot)
    assert ended(engine.submit(SliceKey(0, 0, 4), slot, Reason.PREFETCH))
    del slot
    assert becomes(lambda: held() is None)
    engine.close()


def test_closing_ends_every_thread_and_cancels_what_waits(memory_store):
    before = threading.active_count()
    store = FaultyStore(memory_store, lambda number, key: "hang")
    engine = TransferEngine(DiskReads(store), threads=2)
    slots = [torch.empty_like(memory_store.packed(SliceKey(0, 0, 4))) for _ in range(5)]
    tickets = [engine.submit(SliceKey(0, e, 4), slots[e], Reason.DEMAND) for e in range(5)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    time.sleep(0.05)
    store.gate.set()
    closer.join(60)
    assert not closer.is_alive()
    assert threading.active_count() == before
    assert all(ticket.ended for ticket in tickets)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(SliceKey(0, 0, 4), slots[0], Reason.DEMAND)


def test_every_thread_first_enters_its_device():
    """A new thread starts with the first device, which may belong to another rank."""
    entered = []
    engine = TransferEngine(
        CpuDelivery(make_store(make_experts())),
        threads=2,
        timeout=5,
        enter=lambda: entered.append(threading.current_thread().name),
    )
    assert becomes(lambda: len(entered) == 3)
    engine.close()
