"""Work of a device beside its computation, in a step without the host."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Branch:
    """Where work is done beside the computation: here where it stands, since a CPU plays the device."""

    def fork(self) -> AbstractContextManager[None]:
        """Inside, work is enqueued behind what the computing stream was given before, and beside what it is given."""
        return nullcontext()

    def mark(self) -> Any:
        """The point that work on the branch has come to."""

    def join(self, mark: Any) -> None:
        """The computing stream goes on behind a point of the branch."""


class CudaBranch(Branch):
    """A stream of its own, which a capture of the computing stream takes in."""

    def __init__(self, device: torch.device) -> None:
        # Few programs that wait for the link: they begin as soon as there is room for one beside the products.
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def make_branch(device: torch.device) -> Branch:
    return CudaBranch(device) if device.type == "cuda" else Branch()
