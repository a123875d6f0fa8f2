"""The transfer engine: requests for transfers, waiting for them, and their order among each other and with computation.

A ticket that has not begun is moved by the thread that waits for it, as far as its bytes are in memory. So a miss on
the critical path costs a copy and no thread switch, while threads fetch ahead whenever computation leaves time. Where a
copy takes a core that computes, no thread is woken for demand. Where copies are asynchronous, a background copy is
issued when the demand copies before it have ended, and its piece has ended when the copy has.
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

# After a failure the reads of its step that still run are waited for this long; then they count as orphaned.
_SECONDS_TO_SETTLE = 1.0


class TransferEngine:
    """Moves packed experts into slots: demand before prefetch before migration.

    Args:
        waiters_move: whether a waiting thread moves bytes as well; not over a link whose transfers have an order.
        concurrency: provides Lock, Condition and Thread; tests pass others to record or to determine schedules.
    """

    def __init__(
        self,
        delivery: Delivery,
        threads: int,  # that serve the queue; with 0 the thread that waits moves
        *,
        eager: bool = False,  # deliver demand transfers inside ``submit``, for devices where that only enqueues
        timeout: float | None = None,  # seconds that a transfer is waited for; None for ever
        waiters_move: bool = True,
        enter: Callable[[], None] = lambda: None,  # called first by every thread of the engine
        concurrency: Any = threading,
    ) -> None:
        self._delivery = delivery
        self._streams = cast("CudaStreams", delivery.streams)  # used only with events, which it alone makes
        self._last_demand: Any = None  # event behind the last demand copy
        self._timeout = timeout
        self._waiters_move = waiters_move
        self._queue = TicketQueue(threads > 0, eager, lambda: waiters_move and delivery.occupies_cores, concurrency)
        self._workers = Workers(self._queue, self._run, threads, timeout is not None, concurrency, enter)

    @property
    def occupies_cores(self) -> bool:
        """Whether transfers take cores that compute, so that the two are better done in turn."""
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
        """Request a transfer and return at once; arguments as for :class:`Ticket`. Raises RuntimeError if the engine is
        closed.
        """
        at_once = self._delivery.demanded_at_once
        ticket = Ticket(key, destination, reason, after, projections, at_once, ready=time.perf_counter())
        piece = self._queue.submit(ticket)
        if piece is not None:
            self._run(ticket, piece)
        return ticket

    def demand(self, ticket: Ticket) -> None:
        """Make what has not arrived of a ticket a demand transfer."""
        if ticket.reason is not Reason.DEMAND:
            self._run(ticket, self._queue.demand(ticket))

    def wait(self, ticket: Ticket, projections: int = ALL) -> None:
        """Wait until computation issued from now on will see the first ``projections`` of a packed expert; demands all
        of it.

        Computation is ordered after the copies of these projections, not after those of the others. Raises
        TransferError if the transfer failed, was cancelled, or took longer than the engine waits.
        """
        begin = time.perf_counter()
        try:
            if ticket.reason is not Reason.DEMAND:
                self.demand(ticket)
            while True:
                try:
                    piece = self._queue.wait(ticket, projections, self._timeout, begin=self._waiters_move)
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
                first, event = ticket.fences[ticket.followed]
                if first >= projections:  # which may still be running
                    break
                self._streams.computation_waits(event)
                ticket.followed += 1
        finally:
            self._queue.stats.exposed_wait_seconds += time.perf_counter() - begin

    def arrived(self, ticket: Ticket) -> bool:
        """Return whether the whole packed expert has arrived: ``wait`` would not block, and computation would not
        stall.
        """
        return ticket.state is State.DONE and all(self._streams.happened(event) for _, event in ticket.fences)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a transfer, or what follows the piece that is moving. Returns whether it is cancelled now."""
        return self._queue.cancel(ticket)

    def abandon(self, ticket: Ticket) -> None:
        """Cancel a transfer without waiting. A piece that is moving ends in its own time and delays no other."""
        if not self._queue.cancel(ticket):
            self._workers.orphan(ticket)

    def settle(self, ticket: Ticket) -> bool:
        """Whether nothing writes the ticket's slot any more; wait for a moving piece once, with a time limit."""
        if not self._queue.cancel(ticket):
            patience = self._timeout and min(self._timeout, _SECONDS_TO_SETTLE)
            try:
                self._queue.wait(ticket, ALL, 0 if ticket.orphaned else patience)
            except TimeoutError:
                if self._workers.orphan(ticket):
                    return False
        for _, event in ticket.fences:
            self._streams.synchronize(event)
        return True

    def fence(self) -> Any:
        """Return the event of the computation issued so far, for ``submit``; None where computation is synchronous."""
        return None if self._delivery.streams is None else self._streams.record_computation()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend all background transfers inside this context; demand goes on.

        A call from another thread would invalidate the capture of a CUDA graph. On entry this waits for what is moving,
        and raises TransferError if that does not end within the engine's time limit; background transfers then go on.
        """
        quiet = self._queue.pause(self._timeout)
        try:
            if not quiet:
                raise TransferError(
                    f"a read has not ended for {self._timeout:g} seconds, which is transfer_timeout_s, and CUDA graphs "
                    "cannot be captured beside it; check the disk."
                )
            yield
        finally:
            self._queue.resume()

    def close(self) -> None:
        """Cancel pending transfers, finish moving ones, and end all threads except those whose reads do not end."""
        self._workers.close()

    def _run(self, ticket: Ticket, piece: Piece | None, *, wait: bool = True) -> bool:
        """Move a piece and those that follow as long as they are the caller's.

        Returns False if a disk has to be waited for and ``wait`` is not set; the piece then still counts as moving.
        """
        while piece is not None:
            destination = ticket.destination
            if len(piece.projections) != ALL:
                destination = destination[self._delivery.store.experts.format(ticket.key).span(piece.projections)]
            try:
                event = self._deliver(ticket, piece, destination, wait)
            except Exception as error:  # raised again where the ticket is waited for
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
