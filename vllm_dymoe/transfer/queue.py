"""The one engine: a priority queue of tickets, served by threads and by whoever waits.

A ticket that nobody has begun is run by the thread that waits for it. A miss on
the critical path therefore costs a read and no hand-over between threads, while
threads fetch ahead whatever computation leaves them time for.
"""

import heapq
import itertools
import threading
import time
from typing import Any, Protocol

import torch

from vllm_dymoe.experts.store import BlobKey
from vllm_dymoe.transfer.engine import TransferStats
from vllm_dymoe.transfer.ticket import Reason, State, Ticket, TransferError


class Delivery(Protocol):
    """How bytes get from the store into a slot on one kind of device."""

    @property
    def occupies_cores(self) -> bool:
        """Whether moving bytes takes the cores that compute."""
        ...

    def deliver(self, ticket: Ticket) -> Any:
        """Move the bytes. Returns the copy's fence, or None if they are there on return."""
        ...

    def receive(self, fence: Any) -> None:
        """Order computation issued from now on behind ``fence``."""
        ...

    def drain(self, fence: Any) -> None:
        """Block the host until the copy behind ``fence`` has written its last byte."""
        ...

    def fence(self) -> Any:
        """A fence behind the computation issued so far, or None where computation is synchronous."""
        ...


class QueuedEngine:
    """A :class:`~vllm_dymoe.transfer.engine.TransferEngine` over one delivery.

    Args:
        delivery: the device's way of moving bytes.
        threads: threads that serve the queue; with 0 whoever waits does.
        eager: deliver inside ``submit``, for devices where that only enqueues.
    """

    def __init__(self, delivery: Delivery, threads: int, *, eager: bool = False) -> None:
        self.stats = TransferStats()
        self._delivery = delivery
        self._eager = eager
        self._queue: list[tuple[Reason, int, Ticket]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"dymoe-transfer-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def occupies_cores(self) -> bool:
        """Whether transfers take the cores that compute."""
        return self._delivery.occupies_cores

    def submit(self, key: BlobKey, destination: torch.Tensor, reason: Reason, after: Any = None) -> Ticket:
        """Queue a transfer; see :class:`~vllm_dymoe.transfer.engine.TransferEngine`.

        Raises:
            RuntimeError: the engine is closed.
        """
        ticket = Ticket(key, destination, reason, after)
        with self._lock:
            if self._closed:
                raise RuntimeError("the transfer engine is closed")
            if self._eager:
                ticket.state = State.RUNNING
            elif self._threads:
                heapq.heappush(self._queue, (reason, next(self._order), ticket))
                self._work.notify()
        if self._eager:
            self._run(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Wait for a transfer, running it here if nobody has begun; may be called again."""
        begin = time.perf_counter()
        if self._claim(ticket):
            self._run(ticket)
        else:
            ticket.finished.wait()
        if ticket.state is State.DONE and ticket.fence is not None:
            self._delivery.receive(ticket.fence)
        self.stats.exposed_wait_seconds += time.perf_counter() - begin
        if ticket.state is State.FAILED:
            raise TransferError(str(ticket.error)) from ticket.error
        if ticket.state is State.CANCELLED:
            raise TransferError(f"the transfer of {ticket.key} was cancelled")

    def settle(self, ticket: Ticket) -> None:
        """Wait until nothing writes the slot any more."""
        if not self.cancel(ticket):
            ticket.finished.wait()
            if ticket.fence is not None:
                self._delivery.drain(ticket.fence)

    def cancel(self, ticket: Ticket) -> bool:
        """Take back a transfer that has not begun."""
        with self._lock:
            if ticket.state is not State.PENDING:
                return ticket.state is State.CANCELLED
            ticket.state = State.CANCELLED
        ticket.finished.set()
        return True

    def fence(self) -> Any:
        """A fence behind the computation issued so far."""
        return self._delivery.fence()

    def close(self) -> None:
        """Cancel what waits, finish what runs, end the threads."""
        with self._lock:
            self._closed = True
            waiting = [ticket for _, _, ticket in self._queue]
            self._work.notify_all()
        for ticket in waiting:
            self.cancel(ticket)
        for thread in self._threads:
            thread.join()

    def _claim(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.state is not State.PENDING:
                return False
            ticket.state = State.RUNNING
            return True

    def _run(self, ticket: Ticket) -> None:
        try:
            ticket.fence = self._delivery.deliver(ticket)
            end = State.DONE
        except Exception as error:  # whatever went wrong belongs to whoever waits, not to this thread
            ticket.error = error
            end = State.FAILED
        with self._lock:
            ticket.state = end
            if end is State.DONE:
                self.stats.bytes_moved[ticket.reason] += ticket.destination.numel()
                self.stats.transfers[ticket.reason] += 1
            else:
                self.stats.failed += 1
        ticket.finished.set()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                ticket = heapq.heappop(self._queue)[2]
                if ticket.state is not State.PENDING:  # cancelled, or run by whoever waited
                    continue
                ticket.state = State.RUNNING
            self._run(ticket)
