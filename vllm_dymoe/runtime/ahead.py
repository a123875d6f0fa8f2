"""Fetching ahead in a step without the host: a branch of the step, which is captured with it.

    computing   join | decide, gate and up, down | wait | attention ...       | join | decide ...
    branch           | next gate, name           |      | copy what was named |      |

Names are made while a layer is computed, and bytes move when it has been, while the link would idle. They have arrived
when the next layer is decided. Slots of even and of odd layers take turns, so that none is filled while it is read.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_dymoe.predict import OnDevice
from vllm_dymoe.residency.decode_ahead import Copies
from vllm_dymoe.residency.table import Table


class Branch:
    """Where work is done beside the computation: here where it stands, since a CPU plays the device."""

    def fork(self) -> AbstractContextManager[None]:
        """Inside, work is enqueued behind what the computing stream was given before, and beside what it is given."""
        return nullcontext()

    def mark(self) -> Any:
        """The point that work on the branch has come to."""

    def join(self, mark: Any = None) -> None:
        """The computing stream goes on behind the branch, or behind a point of it."""


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

    def join(self, mark: Any = None) -> None:
        computing = torch.cuda.current_stream(self._device)
        if mark is None:
            computing.wait_stream(self._stream)
        else:
            computing.wait_event(mark)


class AheadKernel(Protocol):
    """Names and fetches; see :mod:`~vllm_dymoe.residency.decode_ahead`."""

    def name_ahead(
        self, table: Table, layer: int, ids: Tensor, scores: Tensor, rows: Tensor, copies: Copies
    ) -> None: ...

    def fetch_ahead(self, copies: Copies) -> None: ...


class Ahead:
    """What stands around each layer of a step, of up to so many rows: a predictor names the next layer's experts on a
    branch, and a kernel fetches them."""

    def __init__(self, table: Table, kernel: AheadKernel, predictor: OnDevice, branch: Branch, rows: int) -> None:
        self._table, self._kernel, self._predictor, self._branch = table, kernel, predictor, branch
        self._copies = Copies.allocate(rows, predictor.guesses, table.experts, table.tier.device)
        self._named = self._fetching = False

    @property
    def nbytes(self) -> int:
        """Device memory of lists; predictor and slots are counted elsewhere."""
        return sum(tensor.nbytes for tensor in vars(self._copies).values())

    def name(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Before a layer is decided: choose what is fetched for the next one, beside it."""
        self.join()
        if layer + 1 < self._table.layers:
            with self._branch.fork():
                experts, scores = self._predictor.foresee(layer, x, ids)
                self._kernel.name_ahead(self._table, layer + 1, experts, scores, rows, self._copies)
            self._named = True

    def fetch(self) -> None:
        """Behind a layer: fetch what was chosen, beside what comes next."""
        if self._named:
            # What computation is given next may lie where the layer's input does, out of which names are made.
            self._branch.join()
            with self._branch.fork():
                self._kernel.fetch_ahead(self._copies)
            self._named, self._fetching = False, True

    def join(self) -> None:
        """What was fetched is there, for the computing stream. Nothing outside of a capture may be waited for in it."""
        if self._fetching:
            self._branch.join()
            self._fetching = False


def make_branch(device: torch.device) -> Branch:
    return CudaBranch(device) if device.type == "cuda" else Branch()
