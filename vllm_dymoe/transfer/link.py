"""An emulated link: bytes arrive no sooner than over a link of a given rate, in wall-clock time.

On a CPU the way from the host store into a slot is a memory copy, far faster relative to computation than PCIe is to a
GPU's. Wrapped in this, the same engine shows what a slower link does. It behaves as a copy engine: one queue for all
transfers, which runs beside computation and takes no core but for the copy itself. So it sleeps until the moment when
the last byte would arrive.
"""

import ctypes
import threading
import time
from typing import Any

import torch

from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.transfer.delivery import Delivery
from vllm_dymoe.transfer.ticket import Ticket

_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl


class EmulatedLink(Delivery):
    """A delivery at the rate of a link.

    Args:
        delivery: moves the bytes, on return of its ``deliver``.
        bytes_per_second: of the link.
    """

    def __init__(self, delivery: Delivery, bytes_per_second: float) -> None:
        super().__init__(delivery.store)
        self._delivery = delivery
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free = 0.0  # when the last byte that was promised so far arrives
        self._last = 0.0, 0.0  # when the last transfer began and ended

    def demanded_at_once(self, key: BlobKey) -> int:
        """One: an emulated transfer has no fixed cost."""
        return 1

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        self._delivery.deliver(ticket, projections, destination, wait=wait)
        with self._lock:
            # The link begins when it is free and not when this thread was woken: a late thread loses no link time.
            begin = max(self._free, ticket.ready)
            self._free = due = begin + destination.numel() / self._bytes_per_second
            self._last = begin, due
        sleep_until(due)

    def moments(self, event: Any) -> tuple[Any, Any]:
        """When the link was busy with the last transfer, which one thread served."""
        return self._last


def sleep_until(due: float) -> None:
    """Sleep until a moment of ``time.perf_counter``, exact to some microseconds."""
    left = due - time.perf_counter()
    if left > 0:
        _prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # of this thread; the kernel may oversleep by 50 us otherwise
        time.sleep(left)
