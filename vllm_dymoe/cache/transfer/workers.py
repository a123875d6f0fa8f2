"""The threads of a transfer engine.

Some serve the queue. One only waits for disks: a disk may never answer, and a thread in a read cannot be interrupted,
so a waiter with a time limit hands over what is not in memory. A read that outlasts the limit keeps its slot and its
thread until it ends, and another thread replaces that one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_dymoe.cache.transfer.queue import TicketQueue
from vllm_dymoe.cache.transfer.ticket import Piece, State, Ticket

_SECONDS_TO_CLOSE = 5.0

_Take = Callable[[], tuple[Ticket, Piece] | None]


class Workers:
    """Threads that take pieces from a queue and ``run`` them.

    One more thread waits for disks.
    """

    def __init__(
        self,
        queue: TicketQueue,
        run: Callable[[Ticket, Piece], object],
        threads: int,
        disk: bool,
        concurrency: Any,  # has Condition and Thread
        enter: Callable[[], None],  # called first by every thread
    ) -> None:
        self._queue = queue
        self._run = run
        self._concurrency, self._enter = concurrency, enter
        self._handed_over: deque[tuple[Ticket, Piece]] = deque()
        self._must_wait = concurrency.Condition(queue.lock)  # notified when a piece is handed over
        self._threads: set[threading.Thread] = set()
        for take in [queue.take] * threads + [self._take_handed_over] * disk:
            self._start(take)

    def hand_over(self, ticket: Ticket, piece: Piece) -> None:
        """Hand over a running piece that has to wait for a disk."""
        with self._queue.lock:
            ticket.handed_over = True
            self._handed_over.append((ticket, piece))
            self._must_wait.notify()

    def orphan(self, ticket: Ticket) -> bool:
        """Let a moving ticket end in its own time, and replace its thread.

        Returns False if it is not moving any more.
        """
        with self._queue.lock:
            if ticket.state is not State.RUNNING:
                return False
            if not ticket.orphaned:
                ticket.orphaned = True
                if not self._queue.closed:
                    self._start(self._take_handed_over if ticket.handed_over else self._queue.take)
            return True

    def close(self) -> None:
        """Close the queue and wait for the threads.

        A thread whose read does not end dies with the process.
        """
        self._queue.close()
        with self._queue.lock:
            self._must_wait.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _take_handed_over(self) -> tuple[Ticket, Piece] | None:
        with self._queue.lock:
            while not self._handed_over and not self._queue.closed:
                self._must_wait.wait()
            return self._handed_over.popleft() if self._handed_over else None

    def _start(self, take: _Take) -> None:
        thread = self._concurrency.Thread(target=lambda: self._serve(take), name="dymoe-transfer", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self, take: _Take) -> None:
        # Each ticket has a call of its own, so that an idle thread keeps no ticket, and with it no slot, alive.
        self._enter()
        while self._serve_one(take):
            pass

    def _serve_one(self, take: _Take) -> bool:
        """Serve one piece; return False if this thread has to end."""
        taken = take()
        if taken is None:
            return False
        ticket, piece = taken
        self._run(ticket, piece)
        with self._queue.lock:
            if ticket.orphaned:  # another thread has replaced this one
                self._threads.discard(threading.current_thread())
            return not ticket.orphaned
