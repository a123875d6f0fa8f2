"""An emulated link: bytes arrive no sooner than over a link of a given rate, in wall-clock time.

On a CPU the way from the host store into a slot is a memory copy, far faster beside
the computation than PCIe is beside a GPU's. With this around it the same engine
shows what a slower link does. It behaves as a copy engine does: one queue for all
transfers, which goes on while computation runs and takes no core but for the copy
itself, so that waiting is sleeping until the moment when the last byte would arrive.
"""

import ctypes
import threading
import time
from typing import Any

from vllm_dymoe.experts.layout import BlobKey
from vllm_dymoe.transfer.queue import Delivery
from vllm_dymoe.transfer.ticket import Ticket

_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl


class EmulatedLink:
    """A delivery at the rate of a link.

    Args:
        delivery: what really moves the bytes.
        bytes_per_second: of the link.
    """

    occupies_cores = False
    timed = False

    def __init__(self, delivery: Delivery, bytes_per_second: float) -> None:
        self._delivery = delivery
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free = 0.0  # when the last byte that was promised so far arrives
        self._last = 0.0, 0.0  # when the last transfer began and ended

    def demanded_at_once(self, key: BlobKey) -> int:
        """One: what is emulated has no price for each transfer."""
        return 1

    def deliver(self, ticket: Ticket, projections: range, *, wait: bool = True) -> None:
        """Move the bytes, and return when the link would have."""
        span = self._delivery.span(ticket, projections)
        self._delivery.deliver(ticket, projections, wait=wait)
        with self._lock:
            # The link begins when it is free and not when this thread was woken: whoever comes late loses no time.
            begin = max(self._free, ticket.ready)
            self._free = due = begin + (span.stop - span.start) / self._bytes_per_second
            self._last = begin, due
        _sleep_until(due)

    def span(self, ticket: Ticket, projections: range) -> slice:
        """Of what really moves the bytes, like all below."""
        return self._delivery.span(ticket, projections)

    def name(self, key: BlobKey) -> str:
        """The blob, for people."""
        return self._delivery.name(key)

    def receive(self, fence: Any) -> None:
        """Order computation behind a copy."""
        self._delivery.receive(fence)

    def drain(self, fence: Any) -> None:
        """Wait for a copy."""
        self._delivery.drain(fence)

    def happened(self, fence: Any) -> bool:
        """Whether a copy has ended."""
        return self._delivery.happened(fence)

    def fence(self) -> Any:
        """A fence behind the computation so far."""
        return self._delivery.fence()

    def moments(self, fence: Any) -> tuple[Any, Any]:
        """When the link was busy with the transfer that ended last; one thread serves it."""
        return self._last


def _sleep_until(due: float) -> None:
    """Sleep until a moment of ``time.perf_counter``, exact to some microseconds."""
    left = due - time.perf_counter()
    if left > 0:
        _prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread; the kernel may oversleep by 50 us otherwise
        time.sleep(left)
