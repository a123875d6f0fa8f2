"""Which transfer may begin: the queue alone, without bytes or threads."""

import threading

import pytest

from vllm_dymoe.cache.transfer.queue import TicketQueue
from vllm_dymoe.cache.transfer.ticket import ALL, Piece, Reason, State, Ticket


def make_queue(eager=False):
    return TicketQueue(True, eager, lambda: False, threading)


def submit(queue, reason, wanted=ALL, at_once=ALL):
    ticket = Ticket(None, None, reason, wanted=wanted, demanded_at_once=at_once)
    return ticket, queue.submit(ticket)


def take_all(queue):
    """Run the queue as one thread would; return (ticket, projections) in order."""
    order = []
    while queue._due():
        ticket, piece = queue.take()
        order.append((ticket, list(piece.projections)))
        queue.arrived(ticket, piece, 1, None)
    return order


def test_demand_then_prefetch_then_migration_and_the_oldest_first():
    queue = make_queue()
    reasons = [Reason.MIGRATION, Reason.PREFETCH, Reason.DEMAND, Reason.PREFETCH, Reason.DEMAND]
    old, first, demand, second, late = (submit(queue, reason)[0] for reason in reasons)
    assert take_all(queue) == [
        *((ticket, [0, 1, 2]) for ticket in (demand, late)),
        *((ticket, [piece]) for ticket in (first, second, old) for piece in range(3)),
    ]
    assert queue.stats.bytes_moved == {Reason.DEMAND: 2, Reason.PREFETCH: 6, Reason.MIGRATION: 3}
    assert queue.stats.transfers == {Reason.DEMAND: 2, Reason.PREFETCH: 2, Reason.MIGRATION: 1}


def test_what_is_demanded_halfway_goes_on_at_the_borders_of_its_pieces():
    queue = make_queue()
    ticket, _ = submit(queue, Reason.PREFETCH, at_once=2)
    _, piece = queue.take()
    queue.demand(ticket)
    assert queue.arrived(ticket, piece, 1, None) is None
    assert take_all(queue) == [(ticket, [1]), (ticket, [2])]


def test_background_begins_only_while_no_demand_runs_and_nothing_is_paused():
    queue = make_queue()
    submit(queue, Reason.PREFETCH)
    demand, _ = submit(queue, Reason.DEMAND)
    taken, piece = queue.take()
    assert taken is demand
    assert not queue._due()
    assert not queue.pause(timeout=0), "a piece runs"
    queue.arrived(demand, piece, 1, None)
    assert not queue._due()
    assert queue.pause(timeout=0)
    queue.resume()
    assert not queue._due(), "two have paused"
    queue.resume()
    assert queue._due()


def test_a_waiter_begins_what_has_not_begun_and_waits_for_what_runs():
    queue = make_queue()
    ticket, _ = submit(queue, Reason.DEMAND, at_once=2)
    piece = queue.wait(ticket, 1, 0, begin=True)
    assert piece == Piece(Reason.DEMAND, range(2))
    with pytest.raises(TimeoutError):
        queue.wait(ticket, 1, 0, begin=True)
    queue.arrived(ticket, piece, 1, None)
    assert queue.wait(ticket, 2, 0, begin=True) is None
    assert queue.wait(ticket, 3, 0, begin=True).projections == range(2, 3)
    assert not queue.cancel(ticket)
    assert queue.failed(ticket, Piece(Reason.DEMAND, range(2, 3)), OSError()) is None
    assert ticket.state is State.CANCELLED, "it is not wanted any more"


def test_an_eager_queue_gives_demand_to_the_submitting_thread():
    queue = make_queue(eager=True)
    ticket, piece = submit(queue, Reason.DEMAND, at_once=2)
    following = queue.arrived(ticket, piece, 1, None)
    assert (piece.projections, following.projections) == (range(2), range(2, 3))
    assert submit(queue, Reason.PREFETCH)[1] is None


def test_what_is_asked_for_in_part_rests_and_failed_predictions_are_tried_again():
    queue = make_queue()
    ticket, _ = submit(queue, Reason.PREFETCH, wanted=2)
    assert take_all(queue) == [(ticket, [0]), (ticket, [1])]
    assert ticket.state is State.RESTING
    prediction, _ = submit(queue, Reason.PREFETCH)
    queue.failed(*queue.take(), OSError())
    assert prediction.state is State.FAILED
    running, _ = submit(queue, Reason.PREFETCH)
    taken = queue.take()
    for each in (ticket, prediction, running):
        queue.demand(each)
    queue.failed(*taken, OSError())  # started as a prefetch, on demand by now
    assert take_all(queue) == [(ticket, [2]), (prediction, [0, 1, 2]), (running, [0, 1, 2])]
    assert queue.stats.failed == 2


def test_a_closed_queue_cancels_what_is_pending_and_takes_nothing():
    queue = make_queue()
    pending, _ = submit(queue, Reason.PREFETCH)
    queue.close()
    assert pending.state is State.CANCELLED
    assert queue.take() is None
    with pytest.raises(RuntimeError, match="closed"):
        submit(queue, Reason.DEMAND)
