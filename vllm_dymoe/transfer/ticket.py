"""One transfer: what is moved where, why, and how far it has come."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import torch

from vllm_dymoe.experts.layout import EVERY_PROJECTION, BlobKey


class TransferError(RuntimeError):
    """A transfer that failed; the message is a sentence for whoever sent the request."""


class Reason(IntEnum):
    """Why bytes move; the smaller goes first."""

    DEMAND = 0
    PREFETCH = 1
    MIGRATION = 2


class State(Enum):
    """Where a ticket is: waiting for its turn, moving, as far as anybody asked, or at one of three ends."""

    PENDING = "pending"
    RUNNING = "running"
    RESTING = "resting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset((State.DONE, State.FAILED, State.CANCELLED))


@dataclass(eq=False, slots=True)
class Ticket:
    """A transfer of one blob into one slot: up to three projections, one after the other.

    Between two projections a ticket is pending again, so that whatever is more urgent goes first.

    Attributes:
        key: which blob.
        destination: uint8 [nbytes], the slot.
        reason: its priority.
        after: fence of the last reader of the slot; the copy waits for it.
        wanted: projections that are asked for, from the first; 0 if nobody wants any more of them.
        order: its place among tickets of the same reason.
        ready: when it last began to wait for the link, in seconds of ``time.perf_counter``.
        state: see :class:`State`; changes under the engine's lock, like the attributes below.
        arrived: projections that are there, as far as the host knows.
        fences: of the copies, where the device copies asynchronously, each with the first projection that it brings.
        followed: how many of them computation is ordered behind.
        error: what went wrong, if it failed.
        handed_over: whoever waited for it has left this turn to a thread, because a disk has to be waited for.
        late: whoever waited has given up while it was running.
        began: when the turn that runs began to move, in seconds of ``time.perf_counter``.
        moved_seconds: what the turns before it took.
    """

    key: BlobKey
    destination: torch.Tensor
    reason: Reason
    after: Any = None
    wanted: int = len(EVERY_PROJECTION)
    order: int = 0
    ready: float = 0.0
    state: State = State.PENDING
    arrived: int = 0
    fences: list[tuple[int, Any]] = field(default_factory=list)
    followed: int = 0
    error: BaseException | None = None
    handed_over: bool = False
    late: bool = False
    began: float = 0.0
    moved_seconds: float = 0.0

    def link_seconds(self, now: float) -> float:
        """How long the link has worked for this transfer until ``now``."""
        return self.moved_seconds + (now - self.began if self.state is State.RUNNING else 0.0)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in _ENDS
