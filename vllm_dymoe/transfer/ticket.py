"""One transfer: what is moved where, why, and how far it has come."""

import threading
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import torch

from vllm_dymoe.experts.store import BlobKey


class TransferError(RuntimeError):
    """A transfer that failed; the message is a sentence for whoever sent the request."""


class Reason(IntEnum):
    """Why bytes move; the smaller goes first."""

    DEMAND = 0
    PREFETCH = 1
    MIGRATION = 2


class State(Enum):
    """A ticket's life: pending, running, then one of the three ends."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Ticket:
    """A transfer of one blob into one slot.

    Attributes:
        key: which blob.
        destination: uint8 [nbytes], the slot.
        reason: its priority.
        after: fence of the last reader of the slot; the copy waits for it.
        state: see :class:`State`; changes under the engine's lock.
        fence: fence of the copy itself where the device copies asynchronously.
        error: what went wrong, if it failed.
        handed_over: whoever waited for it has left it to a thread, because a disk has to be waited for.
        late: whoever waited has given up while it was running.
        finished: set at the end, whichever it is.
    """

    key: BlobKey
    destination: torch.Tensor
    reason: Reason
    after: Any = None
    state: State = State.PENDING
    fence: Any = None
    error: BaseException | None = None
    handed_over: bool = False
    late: bool = False
    finished: threading.Event = field(default_factory=threading.Event)
