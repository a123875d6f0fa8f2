"""Delivery where the "device" is host memory: a real read from the store into the slot."""

import resource
from typing import Any

from vllm_dymoe.experts.layout import EVERY_PROJECTION, BlobKey
from vllm_dymoe.store import HostStore, blob_name
from vllm_dymoe.transfer.ticket import Ticket

# How much a new read counts in the running share; about the last ten matter.
_WEIGHT = 0.1
_BLOCK_BYTES = 512  # the unit of getrusage


class CpuDelivery:
    """Reads straight into the slot; the bytes are there when ``deliver`` returns."""

    timed = False

    def __init__(self, store: HostStore) -> None:
        self._store = store
        self._disk_share = 0.0

    @property
    def occupies_cores(self) -> bool:
        """Whether reads are copies by a core (memory, page cache) rather than waits for a disk."""
        return self._disk_share < 0.5

    def demanded_at_once(self, key: BlobKey) -> int:
        """All: each read has a price of its own, and nobody computes while another one reads."""
        return len(EVERY_PROJECTION)

    def deliver(self, ticket: Ticket, projections: range, *, wait: bool = True) -> None:
        """Read them; file reads release the interpreter lock."""
        destination = ticket.destination
        if len(projections) != len(EVERY_PROJECTION):
            destination = destination[self.span(ticket, projections)]
        # What the kernel fetched for this thread from a disk. Times would tell less: a core that others use looks
        # like a disk.
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        self._store.read_into(ticket.key, destination, projections, wait=wait)
        blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock - before
        share = min(1.0, blocks * _BLOCK_BYTES / destination.numel())
        self._disk_share += _WEIGHT * (share - self._disk_share)

    def span(self, ticket: Ticket, projections: range) -> slice:
        """Where they lie in the slot."""
        return self._store.experts.formats[ticket.key.bits].span(projections)

    def name(self, key: BlobKey) -> str:
        """The blob, for people."""
        return blob_name(self._store, key)

    def receive(self, fence: Any) -> None:
        """Nothing to order: computation is synchronous."""

    def drain(self, fence: Any) -> None:
        """Nothing to wait for."""

    def happened(self, fence: Any) -> bool:
        """Always: there is no fence."""
        return True

    def fence(self) -> None:
        """No fence: a slot's last reader is done when its call returns."""
        return None

    def moments(self, fence: Any) -> None:
        """No fence, no moments of its own: the bytes move while ``deliver`` runs."""
        return None
