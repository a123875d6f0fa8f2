"""The one engine: a priority queue of tickets, served by threads and by whoever waits.

A ticket that nobody has begun is run by the thread that waits for it, as far as
the bytes are in memory. A miss on the critical path therefore costs a copy and no
hand-over between threads, while threads fetch ahead whatever computation leaves
them time for.

A disk may never answer, and a thread inside a read cannot be called back. So what
has to wait for a disk is handed over to a thread that does nothing else, and waited
for with a limit. A read that outlasts it keeps its slot until it ends, and its
thread is replaced.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from vllm_dymoe.experts.store import BlobKey
from vllm_dymoe.transfer.engine import TransferStats
from vllm_dymoe.transfer.ticket import Reason, State, Ticket, TransferError

_SECONDS_TO_CLOSE = 5.0
# After a failure the reads of its step that still run are waited for this long; then they count as late.
_SECONDS_TO_SETTLE = 1.0


class Delivery(Protocol):
    """How bytes get from the store into a slot on one kind of device."""

    @property
    def occupies_cores(self) -> bool:
        """Whether moving bytes takes the cores that compute."""
        ...

    def deliver(self, ticket: Ticket, *, wait: bool = True) -> Any:
        """Move the bytes. Returns the copy's fence, or None if they are there on return.

        Raises:
            BlockingIOError: without ``wait``, a disk would have to be waited for.
        """
        ...

    def name(self, key: BlobKey) -> str:
        """A blob, for people."""
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
        timeout: seconds that a transfer is waited for; None for ever.
    """

    def __init__(self, delivery: Delivery, threads: int, *, eager: bool = False, timeout: float | None = None) -> None:
        self.stats = TransferStats()
        self._delivery = delivery
        self._eager = eager
        self._queue: list[tuple[Reason, int, Ticket]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._served = threads > 0  # a queue that nobody serves would only grow
        self._timeout = timeout
        self._handed_over: SimpleQueue[Ticket | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        for _ in range(threads):
            self._start(self._serve)
        if timeout is not None:
            self._start(self._serve_handed_over)

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
            elif self._served:
                heapq.heappush(self._queue, (reason, next(self._order), ticket))
                self._work.notify()
        if self._eager:
            self._run(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Wait for a transfer, running it here if nobody has begun; may be called again."""
        begin = time.perf_counter()
        if self._claim(ticket) and not self._run(ticket, wait=self._timeout is None):
            ticket.handed_over = True
            self._handed_over.put(ticket)
        if not ticket.finished.wait(self._timeout):
            self._give_up(ticket)
        if ticket.state is State.DONE and ticket.fence is not None:
            self._delivery.receive(ticket.fence)
        self.stats.exposed_wait_seconds += time.perf_counter() - begin
        if ticket.state is State.FAILED:
            raise TransferError(str(ticket.error)) from ticket.error
        if ticket.state is State.CANCELLED:
            raise TransferError(f"the transfer of {ticket.key} was cancelled")

    def settle(self, ticket: Ticket) -> bool:
        """Whether nothing writes the slot any more, after waiting for it once."""
        if self.cancel(ticket):
            return True
        patience = None if self._timeout is None else min(self._timeout, _SECONDS_TO_SETTLE)
        if not ticket.finished.wait(0 if ticket.late else patience) and not self._abandon(ticket):
            return False
        if ticket.fence is not None:
            self._delivery.drain(ticket.fence)
        return True

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
            self._handed_over.put(None)
            threads = list(self._threads)
        for ticket in waiting:
            self.cancel(ticket)
        # A thread whose read does not end dies with the process.
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _claim(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.state is not State.PENDING:
                return False
            ticket.state = State.RUNNING
            return True

    def _run(self, ticket: Ticket, *, wait: bool = True) -> bool:
        """Run a ticket to its end; False if that would need a disk and ``wait`` is not set."""
        try:
            ticket.fence = self._delivery.deliver(ticket, wait=wait)
            end = State.DONE
        except BlockingIOError as error:
            if not wait:
                return False
            ticket.error, end = error, State.FAILED
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
        return True

    def _give_up(self, ticket: Ticket) -> None:
        """Nobody waits any longer for a ticket.

        Raises:
            TransferError: unless it has just ended.
        """
        if self.cancel(ticket) or not self._abandon(ticket):
            self.stats.failed += 1
            raise TransferError(
                f"reading {self._delivery.name(ticket.key)} took longer than transfer_timeout_s, which is "
                f"{self._timeout:g} seconds; check the disk, or raise transfer_timeout_s."
            )

    def _abandon(self, ticket: Ticket) -> bool:
        """Let a running ticket end when it will, with another thread in the place of its own; True if it has ended."""
        with self._lock:
            if ticket.state is not State.RUNNING:
                return True
            if not ticket.late:
                ticket.late = True
                if not self._closed:
                    self._start(self._serve_handed_over if ticket.handed_over else self._serve)
            return False

    def _start(self, serve: Callable[[], None]) -> None:
        thread = threading.Thread(target=serve, name="dymoe-transfer", daemon=True)
        self._threads.add(thread)
        thread.start()

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
            if self._replaced(ticket):
                return
            del ticket  # and with it the slot, for as long as there is nothing to do

    def _serve_handed_over(self) -> None:
        while (ticket := self._handed_over.get()) is not None:
            self._run(ticket)
            if self._replaced(ticket):
                return
            del ticket

    def _replaced(self, ticket: Ticket) -> bool:
        """Whether the thread that ran a ticket has to end, because another one has come in its place meanwhile."""
        with self._lock:
            if ticket.late:
                self._threads.discard(threading.current_thread())
            return ticket.late
