"""Delivery where the "device" is host memory: a real read from the store into the slot."""

import time
from typing import Any

from vllm_dymoe.experts.store import HostStore
from vllm_dymoe.transfer.ticket import Ticket

# How much a new read counts in the running share; about the last ten matter.
_WEIGHT = 0.1


class CpuDelivery:
    """Reads straight into the slot; the bytes are there when ``deliver`` returns."""

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._busy_share = 1.0

    @property
    def occupies_cores(self) -> bool:
        """Whether reads are copies by a core (memory, page cache) rather than waits for a disk."""
        return self._busy_share > 0.5

    def deliver(self, ticket: Ticket) -> None:
        """Read the blob; file reads release the interpreter lock."""
        begin, busy = time.perf_counter(), time.thread_time()
        self._store.read_into(ticket.key, ticket.destination)
        share = (time.thread_time() - busy) / max(1e-9, time.perf_counter() - begin)
        self._busy_share += _WEIGHT * (min(share, 1.0) - self._busy_share)

    def receive(self, fence: Any) -> None:
        """Nothing to order: computation is synchronous."""

    def drain(self, fence: Any) -> None:
        """Nothing to wait for."""

    def fence(self) -> None:
        """No fence: a slot's last reader is done when its call returns."""
        return None
