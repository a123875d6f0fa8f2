"""Delivery where the "device" is host memory: a real read from the store into the slot."""

import resource

import torch

from vllm_dymoe.store import HostStore
from vllm_dymoe.transfer.delivery import Delivery
from vllm_dymoe.transfer.ticket import Ticket

_WEIGHT = 0.1  # of a new read in the running share; about the last ten matter
_BLOCK_BYTES = 512  # the unit of getrusage


class CpuDelivery(Delivery):
    """Reads straight into the slot, whole blobs in demand: each read has a fixed cost, and computation waits for it."""

    def __init__(self, store: HostStore) -> None:
        super().__init__(store)
        self._disk_share = 0.0

    @property
    def occupies_cores(self) -> bool:
        """Whether reads are copies by a core (memory, page cache) rather than waits for a disk."""
        return self.store.occupies_cores and self._disk_share < 0.5

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        """Read; file reads release the interpreter lock."""
        # What the kernel fetched for this thread from a disk. Times would tell less: a core that others use looks
        # like a disk.
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        self.store.read_into(ticket.key, destination, projections, wait=wait)
        blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock - before
        share = min(1.0, blocks * _BLOCK_BYTES / destination.numel())
        self._disk_share += _WEIGHT * (share - self._disk_share)
