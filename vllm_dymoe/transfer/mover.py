"""Moves pieces of tickets, and orders copies with each other and with computation.

Where copies are asynchronous, a background copy is issued when the demand copies before it have ended, and its piece
has ended when its copy has.
"""

import time
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_dymoe.transfer.delivery import Delivery
from vllm_dymoe.transfer.queue import TicketQueue
from vllm_dymoe.transfer.ticket import ALL, Piece, Reason, Ticket

if TYPE_CHECKING:
    from vllm_dymoe.transfer.cuda import CudaStreams


class Mover:
    """Runs pieces on the thread that calls, and tells the queue how each ended."""

    def __init__(self, delivery: Delivery, queue: TicketQueue) -> None:
        self._delivery = delivery
        self._streams = cast("CudaStreams", delivery.streams)  # used only with events, which it alone makes
        self._formats = delivery.store.experts.formats
        self._queue = queue
        self._last_demand: Any = None  # event behind the last demand copy

    def run(self, ticket: Ticket, piece: Piece | None, *, wait: bool = True) -> bool:
        """Move a piece and those that follow as long as they are the caller's. False if a disk has to be waited for and
        ``wait`` is not set; then the piece is still running."""
        while piece is not None:
            destination = ticket.destination
            if len(piece.projections) != ALL:
                destination = destination[self._formats[ticket.key.bits].span(piece.projections)]
            try:
                event = self._deliver(ticket, piece, destination, wait)
            except Exception as error:  # raised again where the ticket is waited for
                if isinstance(error, BlockingIOError) and not wait:
                    return False
                piece = self._queue.failed(ticket, piece, error)
            else:
                piece = self._queue.arrived(ticket, piece, destination.numel(), event)
        return True

    def follow(self, ticket: Ticket, projections: int) -> None:
        """Order computation behind the copies of the first projections, and of no others: they may still be running."""
        while ticket.followed < len(ticket.fences):
            first, event = ticket.fences[ticket.followed]
            if first >= projections:
                return
            self._streams.computation_waits(event)
            ticket.followed += 1

    def copied(self, ticket: Ticket) -> bool:
        return all(self._streams.happened(event) for _, event in ticket.fences)

    def synchronize(self, ticket: Ticket) -> None:
        for _, event in ticket.fences:
            self._streams.synchronize(event)

    def fence(self) -> Any:
        return None if self._delivery.streams is None else self._streams.record_computation()

    def _deliver(self, ticket: Ticket, piece: Piece, destination: torch.Tensor, wait: bool) -> Any:
        """Returns the event behind the copy, if there is one."""
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
