"""No schedule of device-planned steps corrupts a slot, on a recorded device.

A small-batch step, replayed from a graph or launched, is one operation of the computing stream per layer: it reads
slots, and fills cache slots and staging slots. What it leaves to the CPU goes through a CPU queue, whose poller and
watchdog have their own threads. Large-batch steps in between stream through the staging slots on a stream of their own,
ahead of computation, and fill and read cache slots; budgets change in between.
"""

import contextlib
import random
import threading
from dataclasses import replace
from functools import cached_property, partialmethod
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.device_planned import decode, rates_of, run_large_batch
from tests.executor.schedules import (
    EXPERTS,
    LAYERS,
    STORES,
    Program,
    RecordedParts,
    expected,
    make_engine,
    resize_recorded,
)
from tests.executor.steps import make_server, random_step
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
from tests.support.recorded_cpu_queue import DeviceAccesses, RecordedCpuQueue
from tests.support.recorded_device import COMPUTATION, RecordedStore, record_reads
from vllm_dymoe.executor import cpu_execution, cpu_worker, plain_kernels
from vllm_dymoe.executor.device_prefetch import DevicePrefetch
from vllm_dymoe.executor.large_batch import LargeBatches
from vllm_dymoe.executor.plain_kernels import PlainKernels, PlainLargeBatch
from vllm_dymoe.kernels import cpu_queue as queue
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.cpu_queue import QueueShape, post_plain
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import LargeBatchWork
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Table, check_integrity
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.prefetch.on_device import DevicePredictor
from vllm_dymoe.prefetch.popularity import AllExperts

PROMPT = SMALL_BATCH_ROWS + 4
MISSES = ("fetch", "compute", "share") if native.load() else ("fetch",)


class RecordedBranch:
    """A branch of a step that records which work is ordered after which.

    Work is assigned to its ``stream``.
    """

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
    """Record the slots that a decode step fills, and those that it copies from."""

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
    """Record when a layer's list of copies is written.

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


class NamesExperts(DevicePredictor):
    """Predict, after each step, the experts that a program names."""

    answers = iter(())
    history, look_ahead = History(), 1

    def predict(self, layer, x, ids, rows):
        self.history.follow("branch", self.history.now(threading.current_thread()))
        self.history.read("branch", x)
        answer = next(self.answers, ()) if layer + 1 < LAYERS else ()
        for later in range(layer + 1, min(layer + 1 + self.look_ahead, LAYERS)):
            named = dict.fromkeys(expert for of_layer, expert in answer if of_layer == later)
            self._table.predicted[:, later] = -1
            self._table.predicted[0, later, : len(named)] = torch.tensor([*named], dtype=torch.int32)
            self._table.predicted[1, later] = HIGH


class Roomy(Exact):
    """A policy with two groups of two staging slots, and predictions by a program."""

    def staging_slots(self, slots):
        return min(4, slots)

    @cached_property
    def prefetch(self):
        return replace(super().prefetch, needs_gates=False, make=lambda model: ByProgram())


class ByProgram(AllExperts):
    """A predictor whose device's part names experts by a program."""

    def __init__(self):
        super().__init__(LAYERS, EXPERTS)

    def on_device(self, table, experts):
        return NamesExperts(table, experts.top_k)


class DevicePlannedParts(RecordedParts):
    def __init__(self, history):
        super().__init__(history, COMPUTATION)
        self._branch = RecordedBranch(history)

    def decode_kernel(self, kernel, experts, link_gbps=None):
        return RecordedKernels(self._history, self._branch, kernel, experts.of_layers)

    def branch(self):
        return self._branch


def execute(program, turns, history):
    store = RecordedStore(STORES[program.nested], history, turns.pause)
    engine = make_engine("pinned", store, history, turns, None, program)
    made = partialmethod(RecordedCpuQueue.__init__, history, turns, program.late)
    rung = type("Rung", (RecordedCpuQueue,), {"__init__": made})
    with rates_of(3), mock.patch.object(cpu_execution, "CpuQueue", rung):
        server = make_server(
            store,
            program.budget or "100%",
            Roomy(),
            engine=engine,
            parts=DevicePlannedParts(history),
            planning="device",
            misses=program.misses,
        )
    if not program.budget:
        server.resize(server.minimum_budget)
    NamesExperts.answers, NamesExperts.history = iter(program.predictions), history
    NamesExperts.look_ahead = 1 + len(program.predictions) % 2
    inputs = torch.zeros(PROMPT, STORES[program.nested].experts.formats[4].hidden, dtype=torch.bfloat16)
    history.watch(inputs, "a layer's input", [slice(0, inputs.nbytes)])
    server.kernel.asynchronous = True
    record_reads(server.kernel, history, COMPUTATION, turns.pause)
    outputs, before, failed, cpu_queue = [], LAYERS, False, server.cpu_execution.cpu_queue
    with mock.patch.object(queue, "native_library", return_value=cpu_queue):
        for number, (seed, layer, tokens) in enumerate(program.steps):
            if number in program.resizes:
                resize_recorded(server, program.resizes[number])
            if cpu_queue is not None and layer <= before:  # the host begins a step, while the one before may still run
                if failed:
                    server.small_batches.settle()
                failed = cpu_queue.failed
            before = layer
            run = decode if tokens <= SMALL_BATCH_ROWS else run_large_batch
            x, *chosen = random_step(seed, tokens, STORES[program.nested].experts)
            history.follow(COMPUTATION, history.now(threading.current_thread()))
            history.write(COMPUTATION, inputs)  # its memory was another tensor's
            outputs.append(run(server, layer, inputs[:tokens].copy_(x), *chosen))
            check_integrity(server.cache.device_table.table.on_host(), ranges=True)
            if cpu_queue is not None and cpu_queue.given_up:
                outputs[-1], cpu_queue.given_up = None, False
    server.check_integrity()
    engine.close()
    server.cpu_execution.close()
    return outputs


predictions = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=4).map(tuple)
programs = st.builds(
    Program,
    steps=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, LAYERS - 1), st.sampled_from((1, 2, 5, PROMPT))),
        min_size=1,
        max_size=8,
    ).map(tuple),
    budget=st.sampled_from((0, 0.2, 0.4, 0.6, 1.0)),
    nested=st.booleans(),
    predictions=st.lists(predictions, max_size=8).map(tuple),
    resizes=st.dictionaries(st.integers(0, 7), st.sampled_from((0.4, 0.7)), max_size=2),
    misses=st.sampled_from(MISSES),
    late=st.sampled_from((0.0, 0.03)),
)


def equal(outputs, program):
    """Return whether all steps that did not fail are right, and few failed."""
    right = [got is None or torch.equal(got, want) for got, want in zip(outputs, expected(program), strict=True)]
    return all(right) and sum(got is None for got in outputs) <= 2 * LAYERS


@settings(max_examples=40, deadline=None)
@given(programs, st.integers(0, 2**32), st.sampled_from((0.1, 0.5, 1.0)))
def test_no_schedule_corrupts_a_slot(program, seed, restless):
    history = History()
    outputs = execute(program, DeterministicThreads(history, seed, restless), history)
    assert history.races == []
    assert equal(outputs, program)


def random_program(seed, misses=MISSES[:1]):
    """Return a program of prompts and decode steps that predict and stream.

    In every other program a step need not begin with the first layer or run all of them.
    """
    chosen, tokens = random.Random(seed), (1, 5, 5, PROMPT) if misses[0] != "fetch" else (1, 5, 5, PROMPT, PROMPT)
    layers = [chosen.randrange(LAYERS) if seed % 2 else number % LAYERS for number in range(12)]
    return Program(
        steps=tuple((chosen.randrange(50), layer, chosen.choice(tokens)) for layer in layers),
        budget=0.4 if seed % 2 else chosen.choice((0.2, 0.4)),
        nested=seed % 4 == 0,
        predictions=tuple(
            tuple((min(layer + 1, LAYERS - 1), chosen.randrange(EXPERTS)) for _ in range(4)) for layer in layers
        ),
        misses=misses[seed % len(misses)],
        late=0.2 if seed % 4 > 1 else 0.0,
    )


def faults(seeds=range(40), misses=MISSES[:1]):
    """Return the first race or wrong answer that a seed shows, or None."""
    for seed in seeds:
        history, outputs = History(), None
        with contextlib.suppress(AssertionError):
            outputs = execute(random_program(seed, misses), DeterministicThreads(history, seed), history)
        if history.races:
            return history.races[0]
        if outputs and not equal(outputs, random_program(seed, misses)):
            return "wrong"
    return None


def elsewhere(self, source, destination):
    if self._branch.stream == COMPUTATION:
        self._history.write("another", destination)
    self._clocks.append({})
    return PlainKernels.fetch(self, source, destination)


@contextlib.contextmanager
def fork_at_once(self):
    self.stream = "branch"
    yield
    self.stream = COMPUTATION


def number_first(entries, turn, *posted):
    queue.native_library().post(entries.address, int(turn[0]) + 1)
    post_plain(entries, turn, *posted)


def answer_first(self, me, number, seen, section, compute):
    self.move_on(me, number, seen)
    self._history.write(me, section)
    compute()


def as_deep_as_a_step(depth, *sizes):
    return QueueShape(LAYERS, *sizes)


def end_without_predictions(self, layer, end=DevicePrefetch.end_layer):
    self._predicted = {}
    end(self, layer)


PLANTED = {
    "an input goes while predictions read it": (
        DevicePrefetch,
        "end_layer",
        end_without_predictions,
        "a layer's input",
    ),
    "a slot is filled while a layer reads it": (
        RecordedBranch,
        "fork",
        fork_at_once,
        "the branch stream",
    ),
    "what was copied ahead counts for another step": (Table, "forget_ahead", lambda self: None, "stream"),
    "another step begins beside copies for a large one": (
        LargeBatches,
        "settle",
        lambda self: None,
        "while the branch",
    ),
    "two layers list their copies in one place": (
        LargeBatchWork,
        "with_own_spans",
        lambda self: self,
        "of list",
    ),
    "a layer is planned while its list is made": (
        DevicePrefetch,
        "begin_layer",
        lambda self, layer, x, ids: vars(self).update(
            _runs=True, _listed_for=-1, _predicted=self._branch.mark(), _all_made=self._branch.mark()
        ),
        "of what half",
    ),
    "a prediction counts before it has arrived": (
        RecordedKernels,
        "publish_after",
        lambda self, made: {},
        "the computation stream reads",
    ),
    "a group is computed before it is there": (RecordedBranch, "join", lambda self, mark: None, "stream"),
    "a row is published before another stream has filled its slot": (RecordedKernels, "fetch", elsewhere, "writes"),
}
RUNG = {
    "a number is written before its entry": (plain_kernels, "post_plain", number_first, "that answers may still read"),
    "the poller sees a number and not what is behind it": (
        RecordedCpuQueue,
        "acquire",
        lambda self, me: None,
        "that answers reads",
    ),
    "rows are summed before they are answered": (RecordedCpuQueue, "wait", lambda *_: 0, "wrong"),
    "an answer is given before its rows are written": (RecordedCpuQueue, "answer", answer_first, "out of entry"),
    "a step behind one that failed writes over its entries": (
        cpu_worker,
        "QueueShape",
        as_deep_as_a_step,
        "stream writes",
    ),
}


@pytest.mark.parametrize("fault", [*PLANTED, *(RUNG if MISSES[1:] else ())])
def test_a_planted_fault_is_found(fault):
    owner, name, replacement, shows = (PLANTED | RUNG)[fault]
    with mock.patch.object(owner, name, replacement):
        found = faults(misses=MISSES[:1] if fault in PLANTED else MISSES[1:])
    assert found is not None
    assert shows in found


@pytest.mark.parametrize("misses", [MISSES[:1], MISSES])
def test_without_a_fault_nothing_is_found(misses):
    assert faults(range(12), misses) is None
