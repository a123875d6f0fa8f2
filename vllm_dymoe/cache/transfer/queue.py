"""The queue of tickets: which one may begin, in which order, and waiting.

Prefetch and migration move one projection at a time. Between two projections their ticket is pending again: a demand
transfer can overtake it, and it can be cancelled. None of them begins while a demand transfer is moving.
"""

import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm_dymoe.cache.transfer.ticket import ALL, Piece, Reason, State, Ticket, TransferStats


class TicketQueue:
    """Tickets under one lock; moves no bytes and has no threads.

    Args:
        served: whether threads take tickets; without threads a queue would only grow.
        eager: the thread that submits a demand ticket begins it.
        left: returns whether demand is left to the thread that waits for it, so that no woken thread competes with it.
        concurrency: provides Lock and Condition.
    """

    def __init__(self, served: bool, eager: bool, left: Callable[[], bool], concurrency: Any) -> None:
        self.stats = TransferStats()
        self.lock = concurrency.Lock()  # held to change anything here or in a ticket
        self.closed = False
        self._served, self._eager, self._left = served, eager, left
        self._order = itertools.count()
        self._pending: list[tuple[Reason, int, Ticket]] = []  # a heap
        self._demands = 0  # number of running demand pieces
        self._running = 0  # number of running pieces
        self._pauses = 0  # number of pauses in effect
        self._may_begin = concurrency.Condition(self.lock)  # notified when a pending ticket may begin
        self._moved = concurrency.Condition(self.lock)  # notified when a ticket stops moving
        self._waiting = 0  # threads that wait for that; a notification without waiters takes a microsecond

    def count_in(self, stats: TransferStats) -> TransferStats:
        """Use other statistics from now on; return the previous ones."""
        before, self.stats = self.stats, stats
        return before

    def submit(self, ticket: Ticket) -> Piece | None:
        """Enqueue a new ticket; return its first piece if the caller should move it.

        RuntimeError if the queue is closed.
        """
        with self.lock:
            if self.closed:
                raise RuntimeError("the transfer engine is closed")
            ticket.order = next(self._order)
            return self._enqueue(ticket)

    def demand(self, ticket: Ticket) -> Piece | None:
        """Make a ticket a demand transfer.

        Returns its next piece if the caller should move it.
        """
        with self.lock:
            ticket.reason, ticket.wanted = Reason.DEMAND, ALL
            if ticket.state in (State.RESTING, State.FAILED):  # a prediction that failed is tried again
                ticket.state, ticket.ready = State.PENDING, time.perf_counter()
            return self._enqueue(ticket) if ticket.state is State.PENDING else None

    def cancel(self, ticket: Ticket) -> bool:
        """End a ticket that is not moving, or stop a moving one after its piece.

        Returns whether it is cancelled now.
        """
        with self.lock:
            if ticket.state is State.RUNNING:
                ticket.wanted = 0
            elif not ticket.ended:
                ticket.state = State.CANCELLED
                self._moved.notify_all()
            return ticket.state is State.CANCELLED

    def wait(self, ticket: Ticket, timeout: float | None, *, begin: bool = False) -> Piece | None:
        """Block until everything has arrived or the ticket has ended.

        With ``begin`` it returns the next piece as soon as the ticket is pending, for the caller to move; otherwise
        None. TimeoutError after ``timeout`` seconds.
        """
        with self.lock:
            if ticket.arrived == ALL:
                return None
            if begin and ticket.state is State.PENDING:
                return self._begin(ticket)

            if not self._wait_for(lambda: ticket.ended or (begin and ticket.state is State.PENDING), timeout):
                raise TimeoutError
            return None if ticket.ended else self._begin(ticket)

    def arrived(self, ticket: Ticket, piece: Piece, nbytes: int, fence: Any) -> Piece | None:
        """Record that a piece has arrived, or will have after ``fence``.

        Returns the next one if the caller should move it.
        """
        with self.lock:
            ticket.arrived = piece.projections.stop
            if fence is not None:
                ticket.fences.append(fence)
            self.stats.bytes_moved[piece.reason] += nbytes
            self.stats.transfers[ticket.reason] += ticket.arrived == ALL
            return self._end(ticket, piece)

    def failed(self, ticket: Ticket, piece: Piece, error: Exception) -> Piece | None:
        """Record that a piece could not be moved.

        Returns it again if the caller should retry.
        """
        with self.lock:
            self.stats.failed += 1
            return self._end(ticket, piece, error)

    def take(self) -> tuple[Ticket, Piece] | None:
        """Block until a pending ticket may begin, and begin the most urgent one.

        Returns None once the queue is closed.
        """
        with self.lock:
            while not self.closed and not self._due():
                self._may_begin.wait()
            if self.closed:
                return None
            ticket = heapq.heappop(self._pending)[2]
            return ticket, self._begin(ticket)

    def pause(self, timeout: float | None) -> bool:
        """Hold up everything except demand until ``resume``.

        Returns whether all moving pieces have ended in time.
        """
        with self.lock:
            self._pauses += 1
            return self._wait_for(lambda: self._running == 0, timeout)

    def resume(self) -> None:
        with self.lock:
            self._pauses -= 1
            self._may_begin.notify_all()

    def close(self) -> None:
        """Accept no more tickets, cancel pending ones, and release waiting threads."""
        with self.lock:
            self.closed = True
            waiting = [ticket for _, _, ticket in self._pending]
            self._may_begin.notify_all()
        for ticket in waiting:
            self.cancel(ticket)

    # -- with the lock held -------------------------------------------------------------------------

    def _wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        self._waiting += 1
        try:
            return self._moved.wait_for(predicate, timeout)
        finally:
            self._waiting -= 1

    def _enqueue(self, ticket: Ticket) -> Piece | None:
        demanded = ticket.reason is Reason.DEMAND
        if self._eager and demanded:
            return self._begin(ticket)
        if self._served and not (demanded and self._left()):
            heapq.heappush(self._pending, (ticket.reason, ticket.order, ticket))
            self._may_begin.notify()
        return None

    def _due(self) -> bool:
        """Return whether a ticket may begin.

        While there is demand, the link is reserved for it.
        """
        while self._pending and self._pending[0][2].state is not State.PENDING:  # cancelled, or begun by a waiter
            heapq.heappop(self._pending)
        idle = self._demands == 0 and self._pauses == 0
        return bool(self._pending) and (idle or self._pending[0][0] is Reason.DEMAND)

    def _begin(self, ticket: Ticket) -> Piece:
        ticket.state, ticket.handed_over = State.RUNNING, False
        self._running += 1
        demanded = ticket.reason is Reason.DEMAND
        self._demands += demanded
        stop = ticket.wanted if demanded else min(ticket.wanted, ticket.arrived + 1)
        return Piece(ticket.reason, range(ticket.arrived, stop))

    def _end(self, ticket: Ticket, piece: Piece, error: Exception | None = None) -> Piece | None:
        self._running -= 1
        self._demands -= piece.reason is Reason.DEMAND
        if self._pending and self._demands == 0:
            self._may_begin.notify()
        if ticket.arrived == ALL:
            ticket.state = State.DONE
        elif ticket.wanted == 0 or ticket.orphaned:
            ticket.state = State.CANCELLED
        elif error is not None and piece.reason is ticket.reason:
            ticket.state, ticket.error = State.FAILED, error
        else:  # the rest of it, or a failed prediction that is in demand by now
            ticket.state = State.PENDING if ticket.arrived < ticket.wanted else State.RESTING
        if self._waiting:
            self._moved.notify_all()
        return self._enqueue(ticket) if ticket.state is State.PENDING else None
