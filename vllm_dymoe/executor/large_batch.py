"""Large-batch steps without the host: prompts, and batches of more rows than a small-batch step has.

The host enqueues and looks at nothing. What comes passes through the staging slots, half of them at a time (see
``planner.large_batch``), on a stream of its own, and goes on for the next layer before that one is routed, since nearly
every expert of it will be active:

    copies     ... | kept, passing 0 | passing 1 | ... | ahead for the next layer | kept, passing 0 ...
    computing  decide | there, ahead   | passing 0 | ... | last | kept | attention ... | decide | there, ahead ...

In a graph, and where there are hardly any staging slots, a layer is one group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.large_batch import ADMITTED, RESIDENT, STREAMED, LargeBatchShape
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.table import Table

_LEAST_HALF = 2  # staging slots of a group; with fewer there would be as many launches as experts
_MOST_ACTIVE = 0.9
"""Share of a layer's experts that has to be active for certain before copies for it begin without its router."""


class LargeBatchStep(Protocol):
    """The launches of one layer's step, of a shape; its memory serves all layers in turn."""

    shape: LargeBatchShape  # what was allocated for
    ids: Tensor  # int32 [tokens, top_k], experts of what is computed, -1 for the other pairs
    layer_plan: LayerPlan  # of the last layer that was planned

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None,
    ) -> None:  # fmt: skip
        """Decide, and list groups and copies; `half` is where the first group that passes lies, and `ahead` the version
        that the next layer is served at, of which as much is copied as a group behind the last one; 0 for nothing."""
        ...

    def copy(self, group: int) -> None: ...

    def compute(self, group: int) -> None: ...

    def finish(self) -> Tensor:
        """[tokens, hidden], the weighted sums of what was computed, zero for a row that is no token."""
        ...


class LargeBatchKernel(Protocol):
    """Makes large-batch steps."""

    def large_batch_step(self, table: Table, shape: LargeBatchShape, activation: Activation) -> LargeBatchStep: ...


class LargeBatches:
    """Every MoE layer of one rank, in large-batch steps that need no host; of a step int32 [1] rows are tokens."""

    count: Callable[[int, Tensor, Tensor], None] | None = None
    """Counts what routers choose for a layer, int32 and float32 [tokens, top_k]; None where nothing asks."""

    def __init__(
        self, experts: ModelExperts, table: Table, kernel: LargeBatchKernel, branch: Branch, rows: Tensor
    ) -> None:
        self._experts, self._table, self._kernel, self._branch, self._rows = experts, table, kernel, branch, rows
        self._half = self.passing = 0  # staging slots of a group; experts that a layer does not keep
        self._ahead_code = 0
        self._groups = 0  # that have passed so far: they take turns with the halves
        self._pending: tuple[int, Any] | None = None  # the layer for which something was copied ahead, and its event
        self._captured: dict[tuple[LargeBatchShape, Activation], LargeBatchStep] = {}
        self._last: tuple[tuple[LargeBatchShape, Activation], LargeBatchStep] | None = None

    def set_slots(self, staging: Mapping[int, int], quotas: Mapping[int, Sequence[int]]) -> None:
        """How many slots no layer keeps and how many each keeps, by LOW and HIGH of the precisions in use."""
        half = min(staging.values()) // 2
        self._half = half if half >= _LEAST_HALF else 0
        self.passing = self._table.experts - min(min(quotas[code]) for code in quotas)
        self._ahead_code = next(iter(quotas)) if len(quotas) == 1 and not self._table.nested else 0
        self._pending = None

    def forward(
        self,
        layer: int,
        x: Tensor,  # [rows, hidden] bfloat16 or float16
        weights: Tensor,  # float32 [rows, top_k]
        ids: Tensor,  # int [rows, top_k], negative where another rank has the expert
        activation: Activation,
        marks: Tensor | None = None,
        *,
        captured: bool = False,  # the launches go into a graph
    ) -> Tensor:
        """One layer: [rows, hidden], the weighted sum over each token's experts on this rank. Where precision asks for
        them marks are int8 [rows], 1 for tokens of prompts, 2 for heavy hitters among these, 0 for others."""
        step, branch = self._step(len(x), activation, marked=marks is not None, captured=captured), self._branch
        shape, pending = step.shape, self._pending
        if pending is not None and (pending[0] != layer or not shape.passes):
            self.settle()
            pending = None
        active = 1 - (1 - shape.top_k / max(shape.experts, shape.top_k)) ** shape.tokens
        ahead = self._ahead_code if shape.passes and layer + 1 < self._table.layers and active >= _MOST_ACTIVE else 0
        step.plan(layer, x, weights, ids, self._rows, self._groups % 2, ahead, marks)
        if self.count is not None:
            self.count(layer, step.ids, weights)
        if not shape.passes:
            step.copy(ADMITTED)
            step.compute(RESIDENT)
            return step.finish()
        self._groups += shape.passes + 1  # the last one is ahead
        self._pending, last = None, shape.groups + (ahead > 0)
        with branch.fork():
            step.copy(ADMITTED)
            kept = branch.mark()
            step.copy(STREAMED)
            coming = branch.mark()
        if pending is not None:
            branch.join(pending[1])
        step.compute(RESIDENT)
        for group in range(STREAMED, shape.groups):
            # A half is filled again when what was in it has been computed: that is all which was enqueued by now.
            following = None
            if group + 1 < last:
                with branch.fork():
                    step.copy(group + 1)
                    following = branch.mark()
            branch.join(coming)
            step.compute(group)
            coming = following
        if ahead:
            self._pending = layer + 1, coming
        branch.join(kept)
        step.compute(ADMITTED)
        return step.finish()

    def actions(self, ids: Tensor) -> Tensor:
        """Of the layer that was launched last, outside of a graph, as :meth:`~.LayerPlan.actions`."""
        assert self._last is not None
        return self._last[1].layer_plan.actions(ids, self._table.experts)

    def warm_up(self, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> None:
        """Compile and load what layers will launch, in graphs and outside, by steps without tokens."""
        for captured in (False, True):
            for marks in (None, x.new_zeros(len(x), dtype=torch.int8)):
                self.forward(0, x, weights, ids, activation, marks, captured=captured)
                self.settle()
        self._captured.clear()

    def settle(self) -> None:
        """What was copied ahead does not count any more: another kind of step, or another layer, comes."""
        if self._pending is not None:
            self._branch.join(self._pending[1])
            self._table.forget_ahead()
            self._pending = None

    def _step(self, tokens: int, activation: Activation, *, marked: bool, captured: bool) -> LargeBatchStep:
        table, passes = self._table, 0
        if self._half and not captured:
            passes = -(-min(self.passing, tokens * self._experts.top_k) // self._half)
        half = self._half if passes else 0
        shape = LargeBatchShape(tokens, self._experts.top_k, table.experts, 1 + table.nested, half, passes, marked)
        key = shape, activation
        if captured:  # a graph goes on using its memory
            if key not in self._captured:
                self._captured[key] = self._kernel.large_batch_step(table, shape, activation)
            return self._captured[key]
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._kernel.large_batch_step(table, shape, activation)
        return self._last[1]
