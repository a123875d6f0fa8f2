"""The real server on a recorded device, with random steps, transfers and faults."""

import contextlib
import random
import threading
from dataclasses import dataclass, field

import torch

from tests.executor.steps import ByNumber, forward, make_server, random_step
from tests.small_model import make_experts, make_store
from tests.support.recorded_device import COMPUTATION, RecordedStore, RecordedStreams, record_reads
from vllm_dymoe.cache.device_cache import SlotPools
from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.cache.transfer.cuda import StreamDelivery
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.options import ConfigError
from vllm_dymoe.prefetch import Candidate, Predictor
from vllm_dymoe.server import Parts

LAYERS, EXPERTS = 3, 6
STORES = [make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=nested)) for nested in (False, True)]
LARGEST = max(fmt.nbytes for store in STORES for fmt in store.experts.formats.values())
DEVICES = ("pinned", "staged")
KINDS = ("cores", "disk", "link", *DEVICES)
MIXED = {"low": frozenset({0, 3}), "skipped": frozenset({5})}


@dataclass(frozen=True)
class Program:
    steps: tuple[tuple[int, int, int], ...]  # (seed, layer, tokens) of each layer's step
    budget: float = 0.5  # share of the experts that have a slot; 0 is the smallest budget
    staging: int = 2  # staging slots
    mixed: bool = False  # whether experts have different precisions
    nested: bool = False  # whether the low version is nested in the high one
    predictions: tuple[tuple[tuple[int, int], ...], ...] = ()  # candidates after each step, by its number
    projections: int = 3  # number of projections that are prefetched
    captures: bool = False
    """Whether each step is followed by a graph capture, with transfers paused throughout."""
    faults: dict[int, str] = field(default_factory=dict)  # what happens to the n-th read: "fail" or "hang"
    resizes: dict[int, float] = field(default_factory=dict)
    """From a step on, the share of experts that have a slot, by the step's number."""
    misses: str = "fetch"  # how small-batch steps without the host handle misses
    late: float = 0.0  # probability, at each turn, that an answer of the host is abandoned


class HostPredictions(Predictor):
    def __init__(self, answers):
        self._answers = iter(answers)

    def predict(self, layer):
        return [Candidate(*names) for names in next(self._answers, ())]


class RecordedFaults(RecordedStore):
    def __init__(self, store, history, turns, faults):
        super().__init__(store, history, turns.pause)
        self._turns, self._faults, self._reads = turns, faults, 0
        self.hanging = False

    def _fault(self):
        self._reads += 1
        fault = self._faults.get(self._reads - 1)
        if fault == "fail":
            raise StoreError("the disk is on fire")
        if fault == "hang":
            self.hanging = True
            self._turns.block(lambda: not self.hanging)

    def read_into(self, key, destination, projections=range(3), *, wait=True):
        if not wait and self._faults:
            raise BlockingIOError("not in memory")
        self._history.write(threading.current_thread(), destination)
        self._fault()
        super().read_into(key, destination, projections, wait=wait)

    def hold(self, key, projections=range(3), *, wait=True):
        if self.staged:
            return super().hold(key, projections, wait=wait)
        if self._faults.get(self._reads) == "fail":  # reads of memory do not hang
            self._fault()
        self._reads += 1
        return super().hold(key, projections, wait=wait)


class IdleDelivery(CpuDelivery):
    """Move bytes like a disk or a link, without using a core."""

    occupies_cores = False


class RecordedPools(SlotPools):
    """Pools that record all writes into slots.

    Slots are written when they are filled, and when others write into freed memory. ``made`` keeps all pools, so that
    no other memory gets their addresses.
    """

    def __init__(self, history, stream, made, *arguments):
        self._history, self._stream, self._made = history, stream, made
        super().__init__(*arguments)

    def _make(self, fmt, count, reserved):
        pool = super()._make(fmt, count, reserved)
        pool.close = lambda: None
        self._made.append(pool)
        for slot in pool.slots:
            name = f"slot {slot.index} of pool {len(self._made)}"
            self._history.watch(slot.packed, name, fmt.sections)
            slot.packed.fill_(0xEE)
        self.write(pool)
        return pool

    def write(self, pool):
        agent = self._stream or threading.current_thread()
        if self._stream is not None:
            self._history.follow(agent, self._history.now(threading.current_thread()))
        for slot in pool.slots:
            self._history.write(agent, slot.packed)


class RecordedParts(Parts):
    """Recorded memory of a server that computes on a stream.

    If the stream is None, it computes on the calling thread.
    """

    def __init__(self, history, stream):
        super().__init__(torch.device("cpu"))
        self._history, self._stream, self._made = history, stream, []

    def pools(self, plan, experts, bits):
        return RecordedPools(
            self._history, self._stream, self._made, plan, experts, bits, self.device, self.device_memory
        )


def resize_recorded(server, share):
    """Resize, unless a read hangs, and write to the memory of the old slots.

    The next user of the allocator would get that memory.
    """
    before = list(server.cache.pools.values())
    with contextlib.suppress(ConfigError):
        server.resize(share)
        for pool in before:
            server.cache.pools.write(pool)


def make_engine(kind, store, history, turns, timeout, program):
    settings = {"timeout": timeout, "concurrency": turns}
    if kind == "cores":
        return TransferEngine(CpuDelivery(store), 1, **settings)
    if kind == "disk":
        return TransferEngine(IdleDelivery(store), 2, **settings)
    if kind == "link":
        delivery = IdleDelivery(store)
        delivery.demanded_at_once = 1
        return TransferEngine(delivery, 1, waiters_move=False, **settings)
    chance = random.Random(len(program.steps))
    streams = RecordedStreams(history, turns.pause, lambda: chance.random() < 0.5)
    if kind == "pinned":
        engine = TransferEngine(StreamDelivery(store, streams), 1, eager=True, concurrency=turns)
        engine.streams = streams
        return engine
    buffers = [torch.zeros(LARGEST, dtype=torch.uint8) for _ in range(2)]
    for number, buffer in enumerate(buffers):
        history.watch(buffer, f"staging buffer {number}", [slice(0, LARGEST)])
    store.staged = True
    engine = TransferEngine(StreamDelivery(store, streams, buffers, turns), 2, **settings)
    engine.streams = streams
    return engine


def execute(program, kind, turns, history):
    """Run a program with one kind of transfers; return each step's output.

    The output of a step that failed is None.
    """
    store = RecordedFaults(STORES[program.nested], history, turns, program.faults)
    # Virtual time advances only when all threads are blocked, that is when a read hangs.
    engine = make_engine(kind, store, history, turns, 1.0 if program.faults else None, program)
    compute = COMPUTATION if kind in DEVICES else None
    server = make_server(
        store,
        program.budget or plain_server(program).minimum_budget,
        ByNumber(staging=program.staging, projections=program.projections, **(MIXED if program.mixed else {})),
        predictor=HostPredictions(program.predictions) if program.predictions else None,
        engine=engine,
        parts=RecordedParts(history, compute),
    )
    server.kernel.asynchronous = kind in DEVICES
    record_reads(server.kernel, history, compute, turns.pause)
    outputs = []
    with engine.paused() if program.captures else contextlib.nullcontext():
        for number, (seed, layer, tokens) in enumerate(program.steps):
            if number in program.resizes:
                resize_recorded(server, program.resizes[number])
            try:
                outputs.append(forward(server, layer, *random_step(seed, tokens, store.experts)))
            except TransferError:
                outputs.append(None)
            server.check_integrity()
            store.hanging = False
            if program.captures and kind in DEVICES:
                engine.streams.capturing = True
                for _ in range(20):
                    turns.pause()
                engine.streams.capturing = False
                assert engine.streams.intruders == []
    engine.close()
    return outputs


def expected(program):
    server = plain_server(program)
    return [forward(server, layer, *random_step(seed, tokens, server.experts)) for seed, layer, tokens in program.steps]


def plain_server(program):
    policy = ByNumber(**(MIXED if program.mixed else {}))
    return make_server(STORES[program.nested], "100%", policy, threads=0, transfer_timeout_s=0)
