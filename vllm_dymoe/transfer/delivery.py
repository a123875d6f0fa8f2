"""What a kind of device offers the transfer engine."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from vllm_dymoe.residency.format import BlobKey
from vllm_dymoe.store import HostStore
from vllm_dymoe.transfer.ticket import ALL, Ticket


class Streams(Protocol):
    """Asynchronous copies of a device, and events that order them with computation."""

    timed: bool  # copies record when they begin and end

    def copy(self, source: torch.Tensor, destination: torch.Tensor, *, urgent: bool, after: Any) -> Any:
        """Enqueue a copy from page-locked memory behind ``after`` (an event or None); returns the event behind it."""
        ...

    def computation_waits(self, event: Any) -> None:
        """Enqueue, on the computing stream, a wait for ``event``."""
        ...

    def record_computation(self) -> Any:
        """The event behind all computation enqueued so far."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block the host until ``event``."""
        ...

    def happened(self, event: Any) -> bool:
        """Whether ``synchronize`` would not block."""
        ...

    def begun(self, event: Any) -> Any:
        """The event in front of the copy that ``event`` is behind; None if it was not timed."""
        ...


class Delivery(ABC):
    """Moves bytes from a store into slots."""

    streams: Streams | None = None
    """Of a device that copies asynchronously; None where the bytes are there when ``deliver`` returns."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    @property
    def occupies_cores(self) -> bool:
        """Whether moving bytes takes the cores that compute."""
        return False

    def demanded_at_once(self, key: BlobKey) -> int:
        """How many projections of a blob one piece of a demand transfer holds; computation begins with the first piece.

        All other transfers move one at a time.
        """
        return ALL

    @abstractmethod
    def deliver(self, ticket: Ticket, projections: range, destination: torch.Tensor, *, wait: bool = True) -> Any:
        """Move some projections of a ticket's blob into their part of the slot, uint8 [bytes of the projections].

        Returns the event behind the copy, None without streams. BlockingIOError if, without ``wait``, a disk would have
        to be waited for.
        """

    def moments(self, event: Any) -> tuple[Any, Any] | None:
        """Begin and end of the copy behind ``event``, or of the last ``deliver``, as marks of the timeline's clock.

        None if they were not recorded, or, without streams, if they are those of the call of ``deliver``.
        """
        return None
