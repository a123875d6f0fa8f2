"""The transfer engine: requests transfers, waits for them, and orders them.

Transfers are ordered with each other and with computation. A ticket that has not begun is moved by the thread that
waits for it, if its bytes are in memory. So a miss on the critical path costs a copy and no thread switch, while
threads fetch ahead whenever computation leaves time. If a copy takes a core that computes, no thread is woken for
demand. If copies are asynchronous, a background copy is issued only when earlier demand copies have ended, and its
piece ends with the copy.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_dymoe.cache.store import slice_name
from vllm_dymoe.cache.transfer.delivery import Delivery
from vllm_dymoe.cache.transfer.queue import TicketQueue
from vllm_dymoe.cache.transfer.ticket import ALL, Piece, Reason, State, Ticket, TransferError, TransferStats
from vllm_dymoe.cache.transfer.workers import Workers
from vllm_dymoe.experts.format import SliceKey

if TYPE_CHECKING:
    from vllm_dymoe.cache.transfer.cuda import CudaStreams

# After a failure, reads of its step that still run are waited for this long; then they count as orphaned.
_SECONDS_TO_SETTLE = 1.0


class TransferEngine:
    """Moves packed experts into slots: demand before prefetch before migration.

    Args:
        waiters_move: whether a waiting thread moves bytes as well; False for a link that orders its transfers.
        concurrency: provides Lock, Condition and Thread; tests pass others to record or to determine schedules.
    """

    def __init__(
        self,
        delivery: Delivery,
        threads: int,  # threads that serve the queue; with 0 the waiting thread moves bytes
        *,
        eager: bool = False,  # deliver demand transfers inside ``submit``, for devices where that only enqueues
        timeout: float | None = None,  # seconds to wait for a transfer; None for no limit
        waiters_move: bool = True,
        enter: Callable[[], None] = lambda: None,  # called first by every thread of the engine
        concurrency: Any = threading,
    ) -> None:
        self._delivery = delivery
        self._streams = cast("CudaStreams", delivery.streams)  # used only with events, which only it makes
        self._last_demand: Any = None  # event after the last demand copy
        self._timeout = timeout
        self._waiters_move = waiters_move
        self._queue = TicketQueue(threads > 0, eager, lambda: waiters_move and delivery.occupies_cores, concurrency)
        self._workers = Workers(self._queue, self._run, threads, timeout is not None, concurrency, enter)

    @property
    def occupies_cores(self) -> bool:
        """Whether transfers take cores that compute, so that the two should alternate."""
        return self._delivery.occupies_cores

    @property
    def stats(self) -> TransferStats:
        return self._queue.stats

    def reset_stats(self) -> None:
        self._queue.count_in(TransferStats())

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave transfers inside this context out of ``stats``."""
        before = self._queue.count_in(TransferStats())
        try:
            yield
        finally:
            self._queue.count_in(before)

    def submit(
        self, key: SliceKey, destination: torch.Tensor, reason: Reason, after: Any = None, projections: int = ALL
    ) -> Ticket:
        """Request a transfer and return at once.

        Takes the arguments of :class:`Ticket`. Raises RuntimeError if the engine is closed.
        """
        ticket = Ticket(key, destination, reason, after, projections, ready=time.perf_counter())
        piece = self._queue.submit(ticket)
        if piece is not None:
            self._run(ticket, piece)
        return ticket

    def demand(self, ticket: Ticket) -> None:
        """Make what has not arrived of a ticket a demand transfer."""
        if ticket.reason is not Reason.DEMAND:
            self._run(ticket, self._queue.demand(ticket))

    def wait(self, ticket: Ticket) -> None:
        """Wait until computation issued from now on will see the whole packed expert.

        TransferError if the transfer failed, was cancelled, or took longer than the timeout.
        """
        begin = time.perf_counter()
        try:
            if ticket.reason is not Reason.DEMAND:
                self.demand(ticket)
            while True:
                try:
                    piece = self._queue.wait(ticket, self._timeout, begin=self._waiters_move)
                except TimeoutError:
                    if self._queue.cancel(ticket) or self._workers.orphan(ticket):  # it has not ended just now
                        self._queue.stats.failed += 1
                        raise TransferError(
                            f"reading {slice_name(self._delivery.store, ticket.key)} took longer than "
                            f"transfer_timeout_s, which is {self._timeout:g} seconds; check the disk, or raise "
                            "transfer_timeout_s."
                        ) from None
                    break
                if piece is None:
                    break
                if not self._run(ticket, piece, wait=self._timeout is None):
                    self._workers.hand_over(ticket, piece)
            if ticket.state is State.FAILED:
                raise TransferError(str(ticket.error)) from ticket.error
            if ticket.state is State.CANCELLED:
                raise TransferError(f"the transfer of {ticket.key} was cancelled")
            while ticket.followed < len(ticket.fences):
                self._streams.computation_waits(ticket.fences[ticket.followed])
                ticket.followed += 1
        finally:
            self._queue.stats.exposed_wait_seconds += time.perf_counter() - begin

    def arrived(self, ticket: Ticket) -> bool:
        """Return whether the whole packed expert has arrived.

        Then neither ``wait`` nor computation would block.
        """
        return ticket.state is State.DONE and all(self._streams.happened(fence) for fence in ticket.fences)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a transfer, or what follows its moving piece.

        Returns whether it is cancelled now.
        """
        return self._queue.cancel(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Cancel a transfer without waiting.

        A moving piece ends in its own time and delays no other.
        """
        if not self._queue.cancel(ticket):
            self._workers.orphan(ticket)

    def settle(self, ticket: Ticket) -> bool:
        """Wait for a moving piece once, with a time limit.

        Returns whether nothing writes the ticket's slot any more.
        """
        if not self._queue.cancel(ticket):
            patience = self._timeout and min(self._timeout, _SECONDS_TO_SETTLE)
            try:
                self._queue.wait(ticket, 0 if ticket.orphaned else patience)
            except TimeoutError:
                if self._workers.orphan(ticket):
                    return False
        for event in ticket.fences:
            self._streams.synchronize(event)
        return True

    def fence(self) -> Any:
        """Return an event after the computation issued so far, for ``submit``.

        None if computation is synchronous.
        """
        return None if self._delivery.streams is None else self._streams.record_computation()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend all background transfers inside this context; demand continues.

        A call from another thread would invalidate the capture of a CUDA graph. On entry this waits for moving
        transfers, and raises TransferError if they do not end within the time limit; background transfers then
        continue.
        """
        quiet = self._queue.pause(self._timeout)
        try:
            if not quiet:
                raise TransferError(
                    f"a read has not ended for {self._timeout:g} seconds, which is transfer_timeout_s, and CUDA graphs "
                    "cannot be captured meanwhile; check the disk."
                )
            yield
        finally:
            self._queue.resume()

    def close(self) -> None:
        """Cancel pending transfers, finish moving ones, and stop all threads.

        Threads whose reads do not end are left.
        """
        self._workers.close()

    def _run(self, ticket: Ticket, piece: Piece | None, *, wait: bool = True) -> bool:
        """Move a piece and those that follow, as long as they are the caller's to move.

        Returns False if a disk has to be waited for and ``wait`` is not set; the piece then still counts as moving.
        """
        while piece is not None:
            destination = ticket.destination
            if len(piece.projections) != ALL:
                destination = destination[self._delivery.store.experts.format(ticket.key).span(piece.projections)]
            try:
                event = self._deliver(ticket, piece, destination, wait)
            except Exception as error:  # raised again for whoever waits for the ticket
                if isinstance(error, BlockingIOError) and not wait:
                    return False
                piece = self._queue.failed(ticket, piece, error)
            else:
                piece = self._queue.arrived(ticket, piece, destination.numel(), event)
        return True

    def _deliver(self, ticket: Ticket, piece: Piece, destination: torch.Tensor, wait: bool) -> Any:
        """Deliver a piece; return the event of the copy, if there is one."""
        background = piece.reason is not Reason.DEMAND
        if background and self._last_demand is not None:
            self._streams.synchronize(self._last_demand)
        ticket.began = time.perf_counter()
        event = self._delivery.deliver(ticket, piece.projections, destination, wait=wait)
        if event is not None:
            if background:
                self._streams.synchronize(event)
            else:
                self._last_demand = event
        ticket.moved_seconds += time.perf_counter() - ticket.began
        return event
