"""The history knows what is ordered, and nothing else."""

import threading

import pytest
import torch

from tests.support.happens_before import History

HALVES = (slice(0, 4), slice(4, 8))


@pytest.fixture
def history():
    return History()


@pytest.fixture
def memory(history):
    memory = torch.zeros(8, dtype=torch.uint8)
    history.watch(memory, "slot 0", HALVES)
    return memory


def test_a_read_that_does_not_follow_the_write_is_a_race(history, memory):
    history.write("copy", memory)
    history.read("compute", memory[4:])
    assert history.races == ["the compute stream reads bytes 4 to 8 of slot 0 while the copy stream may still write it"]


def test_a_read_that_follows_the_write_is_none(history, memory):
    history.write("copy", memory)
    history.follow("compute", history.now("copy"))
    history.read("compute", memory)
    assert not history.races


def test_an_event_orders_what_lay_before_it_only(history, memory):
    history.write("copy", memory[:4])
    event = history.now("copy")
    history.write("copy", memory[4:])
    history.follow("compute", event)
    history.read("compute", memory[:4])
    assert not history.races
    history.read("compute", memory[4:])
    assert len(history.races) == 1


def test_a_write_has_to_follow_every_reader_and_the_last_writer(history, memory):
    history.write("copy", memory)
    for reader in ("one", "other"):
        history.follow(reader, history.now("copy"))
        history.read(reader, memory[:4])
    history.follow("copy", history.now("one"))
    history.write("copy", memory[:4])
    assert history.races == ["the copy stream writes bytes 0 to 4 of slot 0 while the other stream may still read it"]
    history.write("third", memory[4:])
    assert "third stream writes bytes 4 to 8 of slot 0 while the copy stream may still write it" in history.races[-1]


def test_order_passes_through_others(history, memory):
    history.write("copy", memory)
    history.follow(threading.current_thread(), history.now("copy"))
    history.follow("compute", history.now(threading.current_thread()))
    history.read("compute", memory)
    assert not history.races


def test_places_are_what_a_tensor_covers(history, memory):
    other = torch.zeros(8, dtype=torch.uint8)
    history.watch(other, "slot 1", HALVES)
    history.write("copy", memory[:4])
    history.read("compute", memory[4:])
    history.read("compute", other)
    assert not history.races
    with pytest.raises(AssertionError, match="slot 1 is watched already"):
        history.watch(other, "slot 1", HALVES)
