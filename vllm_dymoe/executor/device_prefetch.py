"""Fetches predicted experts in small-batch steps that the device plans.

The fetches run while the link is idle (``planner.prefetch``).

Everything is enqueued on a branch of the compute stream, so a captured step contains it, too. The compute stream waits
for lists, which are short, and for predictions before their layer is planned; for copies it waits only at the end of a
step, because a capture has to end on one stream. By then the last layer is planned and no copy is under way.

A captured step always has the branch. Between two steps the host writes ``Table.prefetch_slots``, which says how many
experts are copied: none where every expert is resident, and none while predictions do not pay.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_dymoe.cache.host_copy import HostCopy
from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.planner.prefetch import PrefetchList, prefetch_slots, set_prefetch
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.on_device import DevicePredictor
from vllm_dymoe.prefetch.pace import StepPace


class PrefetchKernel(Protocol):
    """Lists, copies and judges predicted experts on a device."""

    def judge_predicted(self, table: Table, layer: int, ids: Tensor, rows: Tensor, listed: PrefetchList) -> None:
        """Enqueue :func:`~vllm_dymoe.planner.prefetch.judge_predicted`."""
        ...

    def list_predicted(
        self, table: Table, layer: int, rows: Tensor, projections: int, out: PrefetchList, look_ahead: int
    ) -> None:
        """Enqueue :func:`~vllm_dymoe.planner.prefetch.list_predicted`."""
        ...

    def copy_predicted(self, table: Table, layer: int, listed: PrefetchList) -> None:
        """Enqueue the copies; those not made before ``layer`` is planned are cancelled."""
        ...


class DevicePrefetch:
    """Predictions and their copies, for the layers of one rank in turn.

    Args:
        rows: int32 [1], number of real tokens of a step.
        projections: how many projections of an expert are fetched, gate first.
        staging: number of staging slots of each precision in use.
        layers: of the model; those after them are a draft's, which run several times in a step.
        pace: decides between steps whether the next one prefetches; None if all do.

    Attributes:
        has_slots: whether there are slots for predicted experts.
    """

    def __init__(
        self, table: Table, kernel: PrefetchKernel, branch: Branch, rows: Tensor, predictor: DevicePredictor,
        listed: PrefetchList, projections: int, staging: Mapping[int, int], layers: int, pace: StepPace | None = None,
    ) -> None:  # fmt: skip
        self._table, self._kernel, self._branch, self._rows = table, kernel, branch, rows
        self._predictor, self._listed, self._projections = predictor, listed, projections
        self._staging, self._layers, self.pace = staging, layers, pace
        self._runs, self._listed_for = False, -1  # whether the branch has unjoined work; the layer of its last list
        self._list_made: Any = None  # event after that list
        self._predicted: Any = None  # event after the predictions of the running layer
        self._all_made: Any = None  # event after all work of the branch so far
        self._counts, self._known = HostCopy(listed.counts), listed.counts.cpu().numpy().copy()
        # Decode steps since counts were last asked for, and the steps that the requested counts cover (0: none is).
        self._steps = self._asked_after = 0
        self.has_slots, self._acts = any(map(prefetch_slots, staging.values())), False
        self._act(acts=True)

    def warm_up(self, x: Tensor, ids: Tensor) -> None:
        """Compile and load the kernels by running a layer without tokens.

        The predictor's gates are not used, because they may not exist yet.
        """
        listed = self._table, 0, self._rows, self._projections, self._listed, self._predictor.look_ahead
        with self._branch.fork():
            self._kernel.judge_predicted(self._table, 0, ids, self._rows, self._listed)
            self._predictor.warm_up(x, ids, self._rows)
            self._kernel.list_predicted(*listed)
            self._kernel.copy_predicted(self._table, 0, self._listed)
            self._runs, self._all_made = True, self._branch.mark()
        self.settle()

    def begin_step(self, tokens: int) -> None:
        """Before a step of requests: decide whether it prefetches.

        The predictor also learns from the counts of earlier steps.

        Args:
            tokens: number of tokens of a decode step; 0 for any other step.
        """
        if self.pace is not None:
            self._act(acts=self.pace.begin_step(tokens))
        if not (most := self._predictor.learns) or not tokens:
            return
        if self._asked_after:
            if self._counts.ready:
                counts = self._counts.take()
                self._predictor.learn(counts - self._known, self._asked_after)
                self._known, self._asked_after = counts, 0
        elif self._steps >= most:
            self._counts.ask(self._listed.counts)
            self._asked_after, self._steps = self._steps, 0
        self._steps += 1

    def begin_layer(self, layer: int, x: Tensor, ids: Tensor) -> None:
        """Before a layer is planned: wait for its list, and predict for the next layer."""
        # A captured graph always has the branch, because it is replayed both with and without prefetch slots.
        if not (self._acts or (x.is_cuda and torch.cuda.is_current_stream_capturing())):
            return
        if self._listed_for >= 0:
            self._branch.join(self._list_made)
        with self._branch.fork():
            if self._listed_for == layer:
                self._kernel.judge_predicted(self._table, layer, ids, self._rows, self._listed)
            self._predictor.predict(layer, x, ids, self._rows)
            self._predicted = self._all_made = self._branch.mark()
        self._runs, self._listed_for = True, -1

    def end_layer(self, layer: int) -> None:
        """After a layer is computed: fetch for the next one.

        At the end of the step, join the branch instead.
        """
        if not self._runs:
            return
        if layer + 1 == self._layers:
            self._join()
            return
        self._branch.join(self._predicted)  # x and ids may be freed, and other work may reuse their memory
        listed = self._table, layer + 1, self._rows, self._projections, self._listed, self._predictor.look_ahead
        with self._branch.fork():
            self._kernel.list_predicted(*listed)
            self._list_made, self._listed_for = self._branch.mark(), layer + 1
            self._kernel.copy_predicted(self._table, layer + 1, self._listed)
            self._all_made = self._branch.mark()

    def observe(self, layer: int, x: Tensor, ids: Tensor) -> None:
        """Learn from a layer of a large batch, in which nothing is predicted."""
        self._predictor.observe(layer, x, ids, self._rows)

    def settle(self) -> None:
        """Join the branch and forget prefetched experts.

        Called before another kind of step, or if the next layer is not the predicted one.
        """
        if self._runs:
            self._join()
            self._table.forget_ahead()

    def _act(self, *, acts: bool) -> None:
        acts &= self.has_slots
        if acts is not self._acts:
            set_prefetch(self._table, self._staging if acts else {})
            self._acts = acts

    def _join(self) -> None:
        self._branch.join(self._all_made)
        self._runs, self._listed_for = False, -1
