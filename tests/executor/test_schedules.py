"""No schedule corrupts a slot of the real server, on a recorded device.

A happens-before check of every access shows whether a slot is read before its bytes are complete, or rewritten before
its last reader, in any interleaving that locks and events allow; the outputs show whether the bytes were right. Planted
faults prove that the test finds each of these.
"""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.schedules import EXPERTS, KINDS, LAYERS, Program, execute, expected
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
from tests.support.recorded_device import RecordedStreams
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.slots import SlotPool
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.queue import TicketQueue
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.executor.prefetcher import Prefetcher
from vllm_dymoe.executor.streamed_layer import LayerStep
from vllm_dymoe.planner.rule import HIT, STREAM
from vllm_dymoe.planner.table import Table
from vllm_dymoe.server import ExpertServer

predictions = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=4).map(tuple)
programs = st.builds(
    Program,
    steps=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, LAYERS - 1), st.sampled_from((1, 1, 2, 9))), min_size=1, max_size=8
    ).map(tuple),
    budget=st.sampled_from((0, 0.2, 0.4, 0.6, 1.0)),
    staging=st.integers(1, 4),
    mixed=st.booleans(),
    nested=st.booleans(),
    predictions=st.lists(predictions, max_size=8).map(tuple),
    projections=st.integers(1, 3),
    captures=st.booleans(),
    faults=st.dictionaries(st.integers(0, 30), st.sampled_from(("fail", "hang")), max_size=3),
    resizes=st.dictionaries(st.integers(0, 7), st.sampled_from((0.4, 0.7)), max_size=2),
)


def check(program, outputs, history):
    assert history.races == []
    for got, want in zip(outputs, expected(program), strict=True):
        assert torch.equal(got, want) if got is not None else program.faults


@settings(max_examples=120, deadline=None)
@given(programs, st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from((0.1, 0.5, 1.0)))
def test_no_schedule_corrupts_a_slot(program, kind, seed, restless):
    """No schedule disturbs a capture either.

    After a read that fails or never ends nothing is captured, because the start ends.
    """
    history, program = History(), replace(program, faults={}) if program.captures else program
    check(program, execute(program, kind, DeterministicThreads(history, seed, restless), history), history)


def random_program(seed):
    """Return a program that prefetches and streams.

    Some predictions are wrong, and some reads fail.
    """
    chosen = random.Random(seed)
    layers = [number % LAYERS for number in range(9)]
    return Program(
        steps=tuple((chosen.randrange(50), layer, chosen.choice((1, 1, 2, 9))) for layer in layers),
        budget=chosen.choice((0, 0.2, 0.4, 0.6)),
        staging=chosen.randint(1, 4),
        predictions=tuple(
            tuple((min(layer + 1, LAYERS - 1), chosen.randrange(EXPERTS)) for _ in range(4)) for layer in layers
        ),
        projections=chosen.randint(1, 3),
        faults={chosen.randrange(20): chosen.choice(("fail", "hang")) for _ in range(3)} if seed % 2 else {},
        resizes={chosen.randrange(9): chosen.choice((0.4, 0.7)) for _ in range(2)},
    )


def races(kind, seeds=range(60)):
    """Return the first race that a seed shows, or None."""
    for seed in seeds:
        history = History()
        # The server's own checks may notice, too; this test ignores them.
        with contextlib.suppress(AssertionError, KeyError):
            execute(random_program(seed), kind, DeterministicThreads(history, seed), history)
        if history.races:
            return history.races[0]
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_nothing_is_found(kind):
    assert races(kind, range(20)) is None


def computation_does_not_wait(monkeypatch):
    monkeypatch.setattr(RecordedStreams, "computation_waits", lambda self, event: None)


def the_last_reader_is_not_remembered(monkeypatch):
    release = Fetcher.release
    monkeypatch.setattr(Fetcher, "release", lambda self, fetch, last_read: release(self, fetch, None))


def published_before_completion(monkeypatch):
    def complete(self, fetch):
        fetch.complete = True
        if fetch.kept:
            self._publish(fetch)

    monkeypatch.setattr(Fetcher, "complete", complete)
    monkeypatch.setattr(TransferEngine, "arrived", lambda self, ticket: True)


def a_projection_is_read_before_it_is_waited_for(monkeypatch):
    wait = TransferEngine.wait
    monkeypatch.setattr(TransferEngine, "wait", lambda self, ticket, count=3: wait(self, ticket, max(count - 1, 1)))


def a_running_transfer_is_cancelled_and_its_slot_freed(monkeypatch):
    def cancel(self, ticket):
        with self.lock:
            if not ticket.ended:
                ticket.state = State.CANCELLED
            return ticket.state is State.CANCELLED

    monkeypatch.setattr(TicketQueue, "cancel", cancel)


def settling_does_not_wait(monkeypatch):
    monkeypatch.setattr(TransferEngine, "settle", lambda self, ticket: True)


def a_prefetched_projection_counts_before_its_copy_has_ended(monkeypatch):
    def deliver(self, ticket, piece, destination, wait):
        return self._delivery.deliver(ticket, piece.projections, destination, wait=wait)

    monkeypatch.setattr(TransferEngine, "_deliver", deliver)


def a_prediction_is_given_up_without_asking(monkeypatch):
    give_up = Fetcher.give_up

    def carelessly(self, fetches, *, wait=False):
        if wait:
            return give_up(self, fetches, wait=True)
        for fetch in fetches:
            self.engine.cancel(fetch.ticket)
            self._free(fetch)

    monkeypatch.setattr(Fetcher, "give_up", carelessly)


def what_a_step_reads_is_evicted(monkeypatch):
    begin_step = Table.begin_step

    def greedy(self, layer, active, wanted, rows=None, **rest):
        places = begin_step(self, layer, active, wanted, rows, **rest)
        read, streamed = active[places[0] == HIT].tolist(), (places[0] == STREAM).nonzero()[0].tolist()
        for number, expert in zip(streamed, read, strict=False):
            places[0, number] = expert
        return places

    monkeypatch.setattr(Table, "begin_step", greedy)


def a_staging_buffer_is_reused_too_early(monkeypatch):
    monkeypatch.setattr(RecordedStreams, "synchronize", lambda self, event: None)


def a_failed_step_forgets_what_it_has_read(monkeypatch):
    """This check found the bug: a computation failed after it had read one projection."""

    def let_go(self):
        held = [*self._computing, *self._ready, *self._arriving]
        self._fetcher.give_up((fetch for h in held for fetch in h.fetches), wait=True)

    monkeypatch.setattr(LayerStep, "_let_go", let_go)


def the_first_copy_into_a_slot_does_not_wait(monkeypatch):
    monkeypatch.setattr(SlotPool, "fence", lambda self, filled: None)


def the_first_copy_waits_for_nothing_but_what_was_there_before_the_slots(monkeypatch):
    allocate, fence = ExpertServer._allocate, SlotPool.fence

    def too_early(self, *arguments):
        filled = self.engine.fence()
        monkeypatch.setattr(SlotPool, "fence", lambda pool, later: fence(pool, filled))
        return allocate(self, *arguments)

    monkeypatch.setattr(ExpertServer, "_allocate", too_early)


def slots_are_freed_while_predictions_are_on_their_way(monkeypatch):
    """Do not wait for an abandoned read, and treat its slot as free."""

    def clear(self):
        self._candidates.clear()
        for fetch in self.ahead:
            self._engine.cancel(fetch.ticket)
            self._fetcher._free(fetch)
        self._ahead.clear()

    monkeypatch.setattr(Prefetcher, "clear", clear)


def only_the_first_expert_of_a_launch_is_waited_for(monkeypatch):
    compute = LayerStep._compute

    def compute_early(self, arriving):
        others = [fetch.ticket for held in self._computing[1:] for fetch in held.fetches] if arriving else []
        wait = self._engine.wait
        self._engine.wait = lambda ticket, *projections: ticket in others or wait(ticket, *projections)
        try:
            compute(self, arriving)
        finally:
            self._engine.wait = wait

    monkeypatch.setattr(LayerStep, "_compute", compute_early)


DEVICE_KINDS = ("pinned", "staged")
FAULTS = [
    (only_the_first_expert_of_a_launch_is_waited_for, DEVICE_KINDS),
    (computation_does_not_wait, DEVICE_KINDS),
    (the_last_reader_is_not_remembered, DEVICE_KINDS),
    (published_before_completion, ("disk", "link", *DEVICE_KINDS)),
    (a_projection_is_read_before_it_is_waited_for, ("link", *DEVICE_KINDS)),
    (a_running_transfer_is_cancelled_and_its_slot_freed, ("disk", "link", *DEVICE_KINDS)),
    (settling_does_not_wait, ("disk",)),
    (a_prefetched_projection_counts_before_its_copy_has_ended, DEVICE_KINDS),
    (a_prediction_is_given_up_without_asking, ("disk", *DEVICE_KINDS)),
    (what_a_step_reads_is_evicted, DEVICE_KINDS),
    (a_failed_step_forgets_what_it_has_read, ("staged",)),
    (a_staging_buffer_is_reused_too_early, ("staged",)),
    (the_first_copy_into_a_slot_does_not_wait, DEVICE_KINDS),
    (the_first_copy_waits_for_nothing_but_what_was_there_before_the_slots, DEVICE_KINDS),
    (slots_are_freed_while_predictions_are_on_their_way, ("disk", *DEVICE_KINDS)),
]


@pytest.mark.parametrize(
    ("fault", "kind"), [pytest.param(f, k, id=f"{f.__name__}-{k}") for f, kinds in FAULTS for k in kinds]
)
def test_a_planted_fault_is_found(monkeypatch, fault, kind):
    fault(monkeypatch)
    assert races(kind) is not None
