"""The real server on a recorded device, with random steps, transfers and faults."""

import contextlib
import random
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tests.executor.steps import ByNumber, forward, make_server, random_step
from tests.small_model import make_experts, make_store
from tests.support.recorded_cpu_queue import DeviceAccesses
from tests.support.recorded_device import COMPUTATION, RecordedStore, RecordedStreams, record_reads
from vllm_dymoe.cache.device_cache import SlotPools
from vllm_dymoe.cache.store import StoreError
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.cache.transfer.cuda import StreamDelivery
from vllm_dymoe.cache.transfer.delivery import CpuDelivery
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.options import ConfigError
from vllm_dymoe.prefetch import Candidate, Predictor
from vllm_dymoe.server import Parts

LAYERS, EXPERTS = 3, 6
STORES = [make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, nested=nested)) for nested in (False, True)]
LARGEST = max(fmt.nbytes for store in STORES for fmt in store.experts.formats.values())
DEVICES = ("pinned", "staged")
ON_CPU = ("cores", "disk", "link")
KINDS = (*ON_CPU, *DEVICES)
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


class RecordedBranch:
    """Records which work is ordered after which; work is assigned to its ``stream``."""

    def __init__(self, history):
        self._history, self.stream = history, COMPUTATION

    @contextlib.contextmanager
    def fork(self):
        self._history.follow(COMPUTATION, self._history.now(threading.current_thread()))  # of the launching thread
        self._history.follow("branch", self._history.now(COMPUTATION))
        self.stream = "branch"
        yield
        self.stream = COMPUTATION

    def mark(self):
        return self._history.now("branch")

    def join(self, mark):
        self._history.follow(COMPUTATION, mark)


class RecordedKernels(PlainKernels):
    """Records the slots that a decode step fills, and the slots that it copies from."""

    def __init__(self, history, branch, *arguments):
        super().__init__(*arguments)
        self._history, self._branch = history, branch
        self._chance, self._clocks, self._watched = random.Random(0), [], False

    def forward(self, *arguments, **told):
        *_, cpu_queue = arguments
        with contextlib.nullcontext() if cpu_queue is None else DeviceAccesses(self._history, cpu_queue):
            return super().forward(*arguments, **told)

    def fetch(self, source, destination):
        stream = self._branch.stream
        self._history.follow(stream, self._history.now(threading.current_thread()))  # of the launching thread
        self._history.read(stream, source)
        self._history.write(stream, destination)
        self._clocks.append(self._history.now(stream))
        return super().fetch(source, destination)

    def list_predicted(self, table, layer, *arguments):
        history = self._history
        if not self._watched:
            self._watched = True
            for half, staged in enumerate(table.staged):
                history.watch(staged, f"what half {half} of the layers finds", [slice(0, staged.nbytes)])
        history.follow("branch", history.now(threading.current_thread()))
        for later in range(layer, min(layer + arguments[-1], LAYERS)):
            history.write("branch", table.staged[later % 2])
        PlainKernels.list_predicted(table, layer, *arguments)

    def copy_predicted(self, *arguments):
        """Any number of the copies may finish before the next layer is planned."""
        self._clocks = []
        super().copy_predicted(*arguments)
        due = self._coming.due
        made = self._chance.randint(0, len(due))
        due[made:] = [(float("inf"), *rest) for _, *rest in due[made:]]
        self._published = self.publish_after(made)

    def publish_after(self, made):
        return self._clocks[made - 1] if made else {}

    def decide(self, table, layer, *arguments, **how):
        self._history.follow(COMPUTATION, self._history.now(threading.current_thread()))
        if self._coming is not None and self._coming.layer == layer:
            self._history.follow(COMPUTATION, self._published)  # the planner sees that they have arrived
        self._history.read(COMPUTATION, table.staged[layer % 2])
        super().decide(table, layer, *arguments, **how)

    def large_batch_step(self, table, shape, activation, kind):
        return RecordedLargeBatch(self, table, shape, activation)


class RecordedLargeBatch(PlainLargeBatch):
    """Records when a layer's list of copies is written.

    Steps are kept alive, so that no list's address is reused.
    """

    _all: ClassVar[list] = []

    def __init__(self, owner, *arguments):
        super().__init__(owner, *arguments)
        self._all.append(self)
        for lists in {id(lists): lists for lists in self.lists}.values():
            spans = lists.spans
            owner._history.watch(spans, f"list {len(self._all)}", [slice(0, spans.nbytes)])

    def plan(self, layer, *arguments):
        history = self._owner._history
        history.follow(COMPUTATION, history.now(threading.current_thread()))
        history.write(COMPUTATION, self.lists[layer % 2].spans)
        super().plan(layer, *arguments)

    def copy(self, group):
        history, stream = self._owner._history, self._owner._branch.stream
        history.follow(stream, history.now(threading.current_thread()))
        history.read(stream, self._large.spans)
        super().copy(group)


class DevicePlannedParts(RecordedParts):
    def __init__(self, history):
        super().__init__(history, COMPUTATION)
        self._branch = RecordedBranch(history)

    def decode_kernel(self, kernel, experts, link_gbps=None):
        return RecordedKernels(self._history, self._branch, kernel, experts.of_layers)

    def branch(self):
        return self._branch


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
        return TransferEngine(IdleDelivery(store), 1, waiters_move=False, **settings)
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
    """Run a program on a CPU with one kind of transfers.

    Returns each step's output, None if it failed.
    """
    store = RecordedFaults(STORES[program.nested], history, turns, program.faults)
    # Virtual time advances only when all threads are blocked, that is when a read hangs.
    engine = make_engine(kind, store, history, turns, 1.0 if program.faults else None, program)
    server = make_server(
        store,
        program.budget or plain_server(program).minimum_budget,
        ByNumber(staging=program.staging, projections=program.projections, **(MIXED if program.mixed else {})),
        predictor=HostPredictions(program.predictions) if program.predictions else None,
        engine=engine,
        parts=RecordedParts(history, None),
    )
    record_reads(server.kernel, history, None, turns.pause)
    outputs = []
    for number, (seed, layer, tokens) in enumerate(program.steps):
        if number in program.resizes:
            resize_recorded(server, program.resizes[number])
        try:
            outputs.append(forward(server, layer, *random_step(seed, tokens, store.experts)))
        except TransferError:
            outputs.append(None)
        server.check_integrity()
        store.hanging = False
    engine.close()
    return outputs


def expected(program):
    server = plain_server(program)
    return [forward(server, layer, *random_step(seed, tokens, server.experts)) for seed, layer, tokens in program.steps]


def plain_server(program):
    policy = ByNumber(**(MIXED if program.mixed else {}))
    return make_server(STORES[program.nested], "100%", policy, threads=0, transfer_timeout_s=0)
