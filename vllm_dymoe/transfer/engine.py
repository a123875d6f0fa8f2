"""What every transfer engine does, whatever the device."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_dymoe.experts.layout import EVERY_PROJECTION, BlobKey
from vllm_dymoe.observe.timeline import Timeline
from vllm_dymoe.transfer.ticket import Reason, Ticket


@dataclass
class TransferStats:
    """What was moved, and how long somebody had to wait for it.

    Attributes:
        bytes_moved: bytes that arrived, by reason.
        transfers: whole blobs that arrived, by the reason that they had in the end.
        failed: transfers that ended in an error.
        exposed_wait_seconds: host time spent in ``wait``.
    """

    bytes_moved: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    transfers: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    failed: int = 0
    exposed_wait_seconds: float = 0.0


class TransferEngine(Protocol):
    """Moves blobs into slots, demand before prefetch before migration.

    Attributes:
        stats: what was moved.
        timeline: takes note of when, while somebody wants to know.
    """

    stats: TransferStats
    timeline: Timeline | None

    @property
    def occupies_cores(self) -> bool:
        """Whether transfers take the cores that compute: then the two are better done in turn than side by side."""
        ...

    def submit(
        self,
        key: BlobKey,
        destination: torch.Tensor,
        reason: Reason,
        after: Any = None,
        projections: int = len(EVERY_PROJECTION),
    ) -> Ticket:
        """Ask for a transfer and return at once.

        Args:
            key: which blob.
            destination: uint8 [nbytes], the slot.
            reason: its priority.
            after: fence of the slot's last reader.
            projections: how many of them are asked for, from the first; the rest only when somebody demands it.
        """
        ...

    def demand(self, ticket: Ticket) -> None:
        """All of it is needed now: what has not arrived becomes a demand transfer."""
        ...

    def wait(self, ticket: Ticket, projections: int = len(EVERY_PROJECTION)) -> None:
        """Return when computation issued from now on will see the first ``projections`` of a blob; demands all of it.

        Computation is ordered behind the copies of these projections, not behind those of the others.

        Raises:
            TransferError: the transfer failed, was cancelled, or took longer than the engine waits.
        """
        ...

    def arrived(self, ticket: Ticket) -> bool:
        """Whether the whole blob is there, so that ``wait`` would not block and computation would not stand still."""
        ...

    def settle(self, ticket: Ticket) -> bool:
        """Whether nothing writes the ticket's slot any more: it is cancelled, finished or failed. Never raises.

        Waits for a transfer that runs, but not for ever, and not a second time.
        """
        ...

    def cancel(self, ticket: Ticket) -> bool:
        """Take a transfer back; False if it has ended otherwise, or while a projection is moving.

        In the second case no further projection follows, and the ticket ends with the one that moves.
        """
        ...

    def fence(self) -> Any:
        """A fence behind the computation issued so far, for the next ``submit`` into a slot it reads; or None."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Within, no thread asks anything of the device but for a transfer that somebody waits for.

        For captures of CUDA graphs, which a call from another thread makes invalid.

        Raises:
            TransferError: on entry, what a thread is doing does not end.
        """
        ...

    def close(self) -> None:
        """Cancel what waits, finish what runs, and end all threads but those whose reads do not end."""
        ...
