"""One transfer: what is moved where, why, and its progress."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch

from vllm_dymoe.experts.format import EVERY_PROJECTION, SliceKey

ALL = len(EVERY_PROJECTION)  # projections of a packed expert


class TransferError(RuntimeError):
    """A transfer failed; the message is a sentence for the sender of the request."""


class Reason(IntEnum):
    """Why bytes are moved; smaller values go first."""

    DEMAND = 0
    PREFETCH = 1
    MIGRATION = 2


class State(Enum):
    """State of a ticket; the last three are final.

    A resting ticket has everything requested so far, but not the whole packed expert.
    """

    PENDING = "pending"
    RUNNING = "running"
    RESTING = "resting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # Enum's own is Python code, and runs whenever a ticket's state is looked up


_ENDS = frozenset((State.DONE, State.FAILED, State.CANCELLED))


class Piece(NamedTuple):
    """The projections that a ticket moves before it is pending again.

    ``reason`` is the one at its begin; the ticket's may change meanwhile.
    """

    reason: Reason
    projections: range


@dataclass(eq=False, slots=True)
class Ticket:
    """A transfer of one packed expert into one slot.

    In demand it is one piece. Otherwise each projection is one, and between two pieces a ticket is pending again, so
    that anything more urgent goes first.
    """

    key: SliceKey  # which packed expert
    destination: torch.Tensor  # uint8 [nbytes], the slot
    reason: Reason  # its priority
    after: Any = None  # event after the slot's last reader; the copy waits for it
    wanted: int = ALL  # number of requested projections, from the first; 0 once it is cancelled
    order: int = 0  # its place among tickets of the same reason
    ready: float = 0.0  # when it last began to wait for the link, in seconds of ``time.perf_counter``
    state: State = State.PENDING  # changes under the queue's lock, like the attributes below
    arrived: int = 0  # projections that have arrived, as far as the host knows
    fences: list[Any] = field(default_factory=list)  # events after the copies, if the device copies asynchronously
    followed: int = 0  # number of fences that computation is ordered after
    error: BaseException | None = None  # the error of a failed ticket
    handed_over: bool = False
    """Whether a waiter left the running piece to a thread, because a disk has to be waited for."""
    orphaned: bool = False  # it was moving when its waiters gave up
    began: float = 0.0  # when the running piece began, in seconds of ``time.perf_counter``
    moved_seconds: float = 0.0  # time that earlier pieces took

    def link_seconds(self, now: float) -> float:
        """Return the seconds that the link has worked for this transfer until ``now``."""
        return self.moved_seconds + (now - self.began if self.state is State.RUNNING else 0.0)

    @property
    def ended(self) -> bool:
        return self.state in _ENDS


@dataclass
class TransferStats:
    """Bytes moved, and the time that the host waited for them."""

    bytes_moved: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Bytes that arrived, by reason."""
    transfers: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Whole packed experts that arrived, by their final reason."""
    failed: int = 0  # failed reads, and transfers that were given up
    exposed_wait_seconds: float = 0.0  # host time spent in ``wait``
