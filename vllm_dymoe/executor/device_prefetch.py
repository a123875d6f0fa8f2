"""Fetches predicted experts in small-batch steps that the device plans, while the link is idle (``planner.prefetch``).

Everything is enqueued on a branch of the compute stream, so a captured step has it, too. The compute stream waits for
predictions when their layer is computed, for lists, which are short, and for copies at the end of a step alone: a
capture has to end on one stream. By then the last layer is planned, and no copy is under way.
"""

from typing import Any, Protocol

from torch import Tensor

from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.planner.prefetch import PrefetchList
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.on_device import DevicePredictor


class PrefetchKernel(Protocol):
    """Lists and makes the copies of predicted experts on a device."""

    def list_predicted(self, table: Table, layer: int, rows: Tensor, projections: int, out: PrefetchList) -> None:
        """Enqueue :func:`~vllm_dymoe.planner.prefetch.list_predicted`."""
        ...

    def copy_predicted(self, table: Table, layer: int, projections: int, listed: PrefetchList) -> None:
        """Enqueue the copies; those that have not been made when ``layer`` is planned are not made."""
        ...


class DevicePrefetch:
    """Predictions and their copies, for the layers of one rank in turn.

    Args:
        rows: int32 [1], number of real tokens of a step.
        projections: how many of an expert are fetched, gate first.
        layers: of the model; those behind them are a draft's, which run several times in a step.
    """

    def __init__(
        self, table: Table, kernel: PrefetchKernel, branch: Branch, rows: Tensor, predictor: DevicePredictor,
        listed: PrefetchList, projections: int, layers: int,
    ) -> None:  # fmt: skip
        self._table, self._kernel, self._branch, self._rows = table, kernel, branch, rows
        self._predictor, self._listed, self._projections, self._layers = predictor, listed, projections, layers
        self._list_made: Any = None  # mark after the list for the layer that comes next
        self._copies_made: Any = None  # mark after everything so far
        self._predicted: Any = None  # mark after the predictions of the running layer

    def begin_layer(self, layer: int, x: Tensor, ids: Tensor) -> None:
        """Before a layer is planned: its list has to be there, and its predictions for the next one begin."""
        if self._list_made is not None:
            self._branch.join(self._list_made)
            self._list_made = None
        with self._branch.fork():
            self._predictor.predict(layer, x, ids, self._rows)
            self._predicted = self._copies_made = self._branch.mark()

    def end_layer(self, layer: int) -> None:
        """After a layer is computed: fetch for the next one, or bring the branch back at the end of the step."""
        if layer + 1 == self._layers:
            self._join()
            return
        self._branch.join(self._predicted)  # x and ids may go, and other work may get their memory
        with self._branch.fork():
            self._kernel.list_predicted(self._table, layer + 1, self._rows, self._projections, self._listed)
            self._list_made = self._branch.mark()
            self._kernel.copy_predicted(self._table, layer + 1, self._projections, self._listed)
            self._copies_made = self._branch.mark()

    def observe(self, layer: int, x: Tensor, ids: Tensor) -> None:
        """Learn from a layer of a large batch, in which nothing is predicted."""
        self._predictor.observe(layer, x, ids, self._rows)

    def settle(self) -> None:
        """Forget what was fetched ahead, because another kind of step or another layer comes next."""
        if self._copies_made is not None:
            self._join()
            self._table.forget_ahead()

    def _join(self) -> None:
        self._branch.join(self._copies_made)
        self._copies_made = self._list_made = None
