"""Deliveries move bytes for the transfer engine.

Those of this module fill host memory, with or without an emulated link.
"""

import resource
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.store.disk import Pacer
from vllm_dymoe.cache.transfer.ticket import Ticket

if TYPE_CHECKING:
    from vllm_dymoe.cache.transfer.cuda import CudaStreams

_WEIGHT = 0.1  # weight of a new read in the running share; about the last ten matter
_BLOCK_BYTES = 512  # the unit of getrusage


class Delivery(ABC):
    """Moves bytes from a store into slots."""

    streams: "CudaStreams | None" = None
    """Streams of a device that copies asynchronously; None if the bytes are complete when ``deliver`` returns."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    @property
    def occupies_cores(self) -> bool:
        """Whether moving bytes takes cores that compute."""
        return False

    @abstractmethod
    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> Any:
        """Move some projections of a ticket's packed expert into their part of the slot.

        The part is uint8 [bytes of the projections]. Returns the event of the copy, or None without streams. Raises
        BlockingIOError if ``wait`` is not set and the bytes are not in memory.
        """


class CpuDelivery(Delivery):
    """Reads directly into the slot.

    On demand it reads whole packed experts, because each read has a fixed cost.
    """

    def __init__(self, store: HostStore) -> None:
        super().__init__(store)
        self._disk_share = 0.0

    @property
    def occupies_cores(self) -> bool:
        """Whether reads are copies by a core rather than waits for a disk.

        A core copies what is in memory or the page cache.
        """
        return self.store.occupies_cores and self._disk_share < 0.5

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        """Read; file reads release the interpreter lock."""
        # Blocks that the kernel read from a disk for this thread. Times would tell less: a core that others use looks
        # like a disk.
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        self.store.read_into(ticket.key, destination, projections, wait=wait)
        blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_inblock - before
        share = min(1.0, blocks * _BLOCK_BYTES / destination.numel())
        self._disk_share += _WEIGHT * (share - self._disk_share)


class EmulatedLink(Delivery):
    """Delays what ``delivery`` moves to the rate of a given link, in wall-clock time.

    On a CPU, moving an expert from the host store to a slot is a memory copy, which is far faster relative to
    computation than PCIe is for a GPU. This class emulates a slower link. Like a copy engine it is one queue for all
    transfers, runs concurrently with computation, and takes no core except for the copy itself: it sleeps until the
    last byte would arrive.
    """

    def __init__(self, delivery: Delivery, bytes_per_second: float) -> None:
        super().__init__(delivery.store)
        self._delivery, self._bytes_per_second, self._pacer = delivery, bytes_per_second, Pacer()

    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> None:
        self._delivery.deliver(ticket, projections, destination, wait=wait)
        self._pacer.wait(destination.numel(), ticket.ready, self._bytes_per_second)
