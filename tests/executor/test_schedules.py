"""No schedule on a CPU corrupts a slot.

The server is the real one, with a happens-before check of every access.

A happens-before check of every access shows whether a slot is read before its bytes are complete, or rewritten before
its last reader, in any interleaving that locks and events allow; the outputs show whether the bytes were right. Planted
faults prove that the test finds each of these.
"""

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.schedules import EXPERTS, LAYERS, ON_CPU, Program, execute, expected
from tests.support.deterministic_threads import DeterministicThreads
from tests.support.happens_before import History
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.transfer.engine import TransferEngine
from vllm_dymoe.cache.transfer.queue import TicketQueue
from vllm_dymoe.cache.transfer.ticket import State
from vllm_dymoe.executor.prefetcher import Prefetcher

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
    faults=st.dictionaries(st.integers(0, 30), st.sampled_from(("fail", "hang")), max_size=3),
    resizes=st.dictionaries(st.integers(0, 7), st.sampled_from((0.4, 0.7)), max_size=2),
)


def check(program, outputs, history):
    assert history.races == []
    for got, want in zip(outputs, expected(program), strict=True):
        assert torch.equal(got, want) if got is not None else program.faults


@settings(max_examples=120, deadline=None)
@given(programs, st.sampled_from(ON_CPU), st.integers(0, 2**32), st.sampled_from((0.1, 0.5, 1.0)))
def test_no_schedule_corrupts_a_slot(program, kind, seed, restless):
    history = History()
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


@pytest.mark.parametrize("kind", ON_CPU)
def test_without_a_fault_nothing_is_found(kind):
    assert races(kind, range(20)) is None


def published_before_completion(monkeypatch):
    def complete(self, fetch):
        fetch.complete = True
        if fetch.kept:
            self._publish(fetch)

    monkeypatch.setattr(Fetcher, "complete", complete)
    monkeypatch.setattr(TransferEngine, "arrived", lambda self, ticket: True)


def a_running_transfer_is_cancelled_and_its_slot_freed(monkeypatch):
    def cancel(self, ticket):
        with self.lock:
            if not ticket.ended:
                ticket.state = State.CANCELLED
            return ticket.state is State.CANCELLED

    monkeypatch.setattr(TicketQueue, "cancel", cancel)


def settling_does_not_wait(monkeypatch):
    monkeypatch.setattr(TransferEngine, "settle", lambda self, ticket: True)


def a_prediction_is_given_up_without_asking(monkeypatch):
    give_up = Fetcher.give_up

    def carelessly(self, fetches, *, wait=False):
        if wait:
            return give_up(self, fetches, wait=True)
        for fetch in fetches:
            self.engine.cancel(fetch.ticket)
            self._free(fetch)

    monkeypatch.setattr(Fetcher, "give_up", carelessly)


def slots_are_freed_while_predictions_are_on_their_way(monkeypatch):
    """Do not wait for an abandoned read, and treat its slot as free."""

    def clear(self):
        self._candidates.clear()
        for fetch in self.ahead:
            self._engine.cancel(fetch.ticket)
            self._fetcher._free(fetch)
        self._ahead.clear()

    monkeypatch.setattr(Prefetcher, "clear", clear)


FAULTS = [
    (published_before_completion, ("disk", "link")),
    (a_running_transfer_is_cancelled_and_its_slot_freed, ("disk", "link")),
    (settling_does_not_wait, ("disk",)),
    (a_prediction_is_given_up_without_asking, ("disk",)),
    (slots_are_freed_while_predictions_are_on_their_way, ("disk",)),
]


@pytest.mark.parametrize(
    ("fault", "kind"), [pytest.param(f, k, id=f"{f.__name__}-{k}") for f, kinds in FAULTS for k in kinds]
)
def test_a_planted_fault_is_found(monkeypatch, fault, kind):
    fault(monkeypatch)
    assert races(kind) is not None
