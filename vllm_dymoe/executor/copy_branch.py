"""A second stream for copies, in steps without the host.

The copies run concurrently with computation.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Branch:
    """A branch on a CPU that stands in for the device.

    Work runs at once, in the calling thread.
    """

    def fork(self) -> AbstractContextManager[None]:
        """Enqueue work on the branch.

        It follows what is on the compute stream now, and runs concurrently with later work.
        """
        return nullcontext()

    def mark(self) -> Any:
        """Return a mark after all work that is on the branch now."""

    def join(self, mark: Any) -> None:
        """Make the compute stream wait for a mark of the branch."""


class CudaBranch(Branch):
    """A CUDA stream of its own; a graph capture of the compute stream includes it."""

    def __init__(self, device: torch.device) -> None:
        # High priority: the few programs that wait for the link start as soon as a multiprocessor has room.
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def fork(self) -> AbstractContextManager[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def make_branch(device: torch.device) -> Branch:
    return CudaBranch(device) if device.type == "cuda" else Branch()
