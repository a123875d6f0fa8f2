"""Delivery to a CUDA device: copies on their own streams, ordered by events.

Two rules make a slot safe: a copy into it waits for the event of its last reader, and computation waits for the event
of the copy. The host waits for neither.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.transfer.delivery import Delivery
from vllm_dymoe.cache.transfer.ticket import Reason, Ticket


class CudaStreams:
    """Asynchronous copies, and the events that order them with computation.

    One stream is for demand, another one of lower priority for everything else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._urgent = torch.cuda.Stream(device, priority=-1)
        self._background = torch.cuda.Stream(device, priority=0)

    def copy(self, source: torch.Tensor, destination: torch.Tensor, *, urgent: bool, after: Any) -> torch.cuda.Event:
        """Enqueue a copy from pinned memory; return the event of its end.

        The copy waits for the event ``after``, unless that is None.
        """
        stream = self._urgent if urgent else self._background
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def computation_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def record_computation(self) -> torch.cuda.Event:
        """Return an event after all computation enqueued so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def happened(self, event: torch.cuda.Event) -> bool:
        return event.query()


class StreamDelivery(Delivery):
    """Copies with the device's copy engines.

    Copies are made directly from pinned memory, otherwise through pinned buffers. Each buffer is uint8 and as large as
    the largest packed expert; their number limits the transfers through them.
    """

    streams: CudaStreams

    def __init__(
        self,
        store: HostStore,
        streams: CudaStreams,
        buffers: Sequence[torch.Tensor] = (),
        concurrency: Any = threading,  # has Lock and Condition
    ) -> None:
        super().__init__(store)
        self.streams = streams
        # Oldest first: each buffer with the event of the copy that may still read it.
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque((buffer, None) for buffer in buffers)
        self._returned = concurrency.Condition(concurrency.Lock())

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> Any:
        with self.store.hold(ticket.key, projections, wait=wait) as held:
            if held is None or not held.pinned:
                return self._through_buffer(ticket, projections, destination, wait)
            source = held.packed[self.store.experts.format(ticket.key).span(projections)]
            held.last_read = event = self._enqueue(ticket, projections, source, destination)
            return event

    def _through_buffer(self, ticket: Ticket, projections: range, destination: torch.Tensor, wait: bool) -> Any:
        with self._returned:
            while not self._buffers:
                if not wait:
                    raise BlockingIOError("every buffer is in use by a read")
                self._returned.wait()
            buffer, busy = self._buffers.popleft()
        event = None
        try:
            if busy is not None:
                self.streams.synchronize(busy)
            staged = buffer[: destination.numel()]
            self.store.read_into(ticket.key, staged, projections, wait=wait)
            event = self._enqueue(ticket, projections, staged, destination)
            return event
        finally:
            with self._returned:
                self._buffers.append((buffer, event))
                self._returned.notify()

    def _enqueue(self, ticket: Ticket, projections: range, source: torch.Tensor, destination: torch.Tensor) -> Any:
        # After the slot's last reader, but only once: later pieces follow the first, on its stream or because it was
        # waited for.
        after = ticket.after if projections.start == 0 else None
        return self.streams.copy(source, destination, urgent=ticket.reason is Reason.DEMAND, after=after)
