"""Large-batch steps with device-side planning.

They are prompts, and batches of more rows than a small-batch step has. The host enqueues everything and waits for
nothing. A copy stream streams experts through the staging slots, half of them at a time (see ``planner.large_batch``).
After the last group it copies experts of the next layer, before that layer is routed, since nearly all of them will be
active:

  copies     | admitted, streamed 0 | streamed 1 | ...  | ahead for the next layer | admitted, streamed 0 | ...
  computing  | plan | resident      | streamed 0 | ...  | last | admitted | attention | plan | resident, ahead | ...

In a CUDA graph, or with fewer than four staging slots, a layer is one group. Without quotas nothing is admitted, and
experts are resident only if they were copied ahead.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import ADMITTED, RESIDENT, STREAMED, LargeBatchShape
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.table import Table

_LEAST_HALF = 2  # fewest staging slots of a group; with one there would be as many launches as experts
_MOST_ACTIVE = 0.9
"""Smallest expected share of active experts for which a layer's experts are copied before its router has run."""


class LargeBatchStep(Protocol):
    """The launches of one layer's step, for one shape.

    All layers use its memory in turn.
    """

    shape: LargeBatchShape  # for which memory was allocated
    ids: Tensor  # int32 [tokens, top_k], the expert of each pair that is computed, -1 for the others
    layer_plan: LayerPlan  # plan of the last planned layer

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None, global_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan a layer, and list its groups and copies.

        Args:
            x: [tokens, hidden], also where weights multiply the experts' inputs.
            half: 0 or 1, the half of the staging slots that the first streamed group uses.
            ahead: LOW or HIGH to copy one more group, of the next layer's experts in that version; 0 for none.
            marks: int8 [tokens], see :meth:`LargeBatches.forward`, or None.
            global_ids: int [tokens, top_k], see ``plan_small_batch``, or None.
        """
        ...

    def copy(self, group: int) -> None: ...

    def compute(self, group: int) -> None: ...

    def finish(self) -> Tensor:
        """Return [tokens, hidden], the weighted sums; zeros for rows that are not tokens."""
        ...


class LargeBatchKernel(Protocol):
    """Makes large-batch steps for a device."""

    def large_batch_step(
        self, table: Table, shape: LargeBatchShape, activation: Activation, kind: int
    ) -> LargeBatchStep:
        """Make a step for layers of a kind, see ``ModelExperts.of_kinds``."""
        ...


StepKey = tuple[LargeBatchShape, Activation, int]
CapturedSteps = dict[StepKey, LargeBatchStep]


class LargeBatches:
    """Every MoE layer of one rank in large-batch steps, for one allocation of slots.

    Args:
        top_k: experts of a token.
        layers: of the model; those after them are a draft's, which run several times in a step.
        rows: int32 [1], how many rows are tokens.
        quotas: slots of each layer, by LOW and HIGH of the precisions in use.
        staging: number of staging slots of each precision in use, for each kind of layers.
        kinds: of each layer, see ``ModelExperts.kinds``.
        captured: steps whose memory captured graphs use; filled here, and kept by the caller.
        count: called with a layer, its ids int32 and its weights float32 [tokens, top_k], to count uses; None to count
            nothing.
        foresees: experts of the next layer are copied before it is routed.
        overlaps: experts arrive while others are computed; otherwise a group is computed when all copies have ended.

    Attributes:
        most_streamed: most experts that a layer does not keep.
    """

    def __init__(
        self, top_k: int, layers: int, table: Table, kernel: LargeBatchKernel, branch: Branch, rows: Tensor,
        quotas: Mapping[int, Sequence[int]], staging: Mapping[int, int], kinds: Sequence[int], captured: CapturedSteps,
        count: Callable[[int, Tensor, Tensor], None] | None = None, *, foresees: bool = True, overlaps: bool = True,
    ) -> None:  # fmt: skip
        self._top_k, self._layers, self._table, self._kernel = top_k, layers, table, kernel
        self._branch, self._rows = branch, rows
        half = min(staging.values()) // 2
        self._half = half if half >= _LEAST_HALF else 0  # staging slots of a group
        self._keeps = any(map(any, quotas.values()))
        self.most_streamed = table.experts - min(map(min, quotas.values()))
        self._overlaps, foresees = overlaps, foresees and overlaps
        self._ahead_code = next(iter(quotas)) if foresees and len(quotas) == 1 and not table.nested else 0
        self._groups = 0  # number of groups streamed so far: groups use the two halves in turn
        self._pending: tuple[int, Any] | None = None  # layer for which experts were copied ahead; mark after the copies
        self._kinds, self._captured, self._count = kinds, captured, count
        self._last: tuple[StepKey, LargeBatchStep] | None = None
        self._keys: dict[tuple[Any, ...], StepKey] = {}

    def forward(
        self,
        layer: int,
        x: Tensor,  # [rows, hidden] bfloat16 or float16
        weights: Tensor,  # float32 [rows, top_k]
        ids: Tensor,  # int [rows, top_k], negative where another rank has the expert
        activation: Activation,
        marks: Tensor | None = None,
        *,
        captured: bool = False,  # the launches are captured in a graph
        weights_on_input: bool = False,  # weights multiply the experts' inputs, not their outputs
        global_ids: Tensor | None = None,  # see ``plan_small_batch``
    ) -> Tensor:
        """Enqueue one layer.

        Args:
            marks: int8 [rows], for policies that ask for them: 1 for a prompt's token, 2 for a heavy hitter, else 0.

        Returns:
            [rows, hidden], the weighted sum over each token's experts on this rank.
        """
        branch, kind = self._branch, self._kinds[layer]
        told = len(x), activation, kind, marks is not None, captured, weights_on_input
        key = self._keys.get(told) or self._keys.setdefault(told, self._make_key(*told))
        if self._pending is not None and (self._pending[0] != layer or self._last is None or self._last[0] != key):
            self.settle()  # before the list of those copies is freed with its step
        step, pending = self._step(key, captured=captured), self._pending
        shape = step.shape
        active = 1 - (1 - shape.top_k / max(shape.experts, shape.top_k)) ** shape.tokens
        follows = self._kinds[layer + 1 : layer + 2] == (kind,)  # a layer with these formats
        foresees = shape.streamed_groups and follows and layer + 1 != self._layers and active >= _MOST_ACTIVE
        ahead = self._ahead_code if foresees else 0
        everywhere = global_ids if self._table.all_experts else None
        step.plan(layer, x, weights, ids, self._rows, self._groups % 2, ahead, marks, everywhere)
        if self._count is not None:
            self._count(layer, step.ids, weights)
        if not shape.streamed_groups:
            step.copy(ADMITTED)
            step.compute(RESIDENT)
            return step.finish()
        self._groups += shape.streamed_groups + 1  # the last group is the next layer's
        groups = shape.groups
        self._pending, last = None, groups + (ahead > 0)
        kept = None
        with branch.fork():
            if self._keeps:
                step.copy(ADMITTED)
                kept = branch.mark()
            step.copy(STREAMED)
            coming = branch.mark()
        if pending is not None:
            branch.join(pending[1])
        if not self._overlaps:
            branch.join(coming)
        if self._keeps or pending is not None:
            step.compute(RESIDENT)
        for group in range(STREAMED, groups):
            # The fork waits for everything enqueued by now, so a half is refilled only after its last reader.
            following, more = None, group + 1 < last
            if more and self._overlaps:
                following = self._copy(step, group + 1)
            branch.join(coming)
            step.compute(group)
            if more and not self._overlaps:
                following = self._copy(step, group + 1)
            coming = following
        if ahead:
            self._pending = layer + 1, coming
        if self._keeps:
            branch.join(kept)
            step.compute(ADMITTED)
        return step.finish()

    def _copy(self, step: LargeBatchStep, group: int) -> Any:
        """Enqueue a group's copies on the branch; return a mark after them."""
        with self._branch.fork():
            step.copy(group)
            return self._branch.mark()

    def actions(self, ids: Tensor) -> Tensor:
        """Return :meth:`~.LayerPlan.actions` of the layer that was launched last.

        Not valid for captured launches.
        """
        assert self._last is not None
        return self._last[1].layer_plan.actions(ids, self._table.experts)

    def warm_up(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation, *, weights_on_input: bool
    ) -> None:
        """Compile and load all kernels by running steps without tokens.

        This covers launches in graphs and plain launches, with few tokens for each expert and with many.

        Args:
            x: more rows than a small batch has, and as many as :func:`crowded_tokens`.
        """
        everywhere = ids.clone()  # another tensor, as in a step of requests
        for captured, rows in product((False, True), {SMALL_BATCH_ROWS + 1, len(x)}):
            given = layer, x[:rows], weights[:rows], ids[:rows], activation
            told: dict[str, Any] = {"captured": captured, "weights_on_input": weights_on_input}
            told["global_ids"] = everywhere[:rows]
            for marks in (None, x.new_zeros(rows, dtype=torch.int8)):
                self.forward(*given, marks, **told)
                self.settle()
        self._captured.clear()

    def settle(self) -> None:
        """Forget what was copied ahead.

        Called before another kind of step, or when another layer follows.
        """
        if self._pending is not None:
            self._branch.join(self._pending[1])
            self._table.forget_ahead()
            self._pending = None

    def _make_key(
        self, tokens: int, activation: Activation, kind: int, marked: bool, captured: bool, weights_on_input: bool,
    ) -> StepKey:  # fmt: skip
        table, streamed_groups = self._table, 0
        if self._half and not captured:
            streamed_groups = -(-min(self.most_streamed, tokens * self._top_k) // self._half)
        half = self._half if streamed_groups else 0
        sizes = tokens, self._top_k, table.experts, 1 + table.nested, half, streamed_groups, marked
        return LargeBatchShape(*sizes, weights_on_input=weights_on_input), activation, kind

    def _step(self, key: StepKey, *, captured: bool) -> LargeBatchStep:
        if captured:  # the graph keeps using this memory
            if key not in self._captured:
                self._captured[key] = self._kernel.large_batch_step(self._table, *key)
            return self._captured[key]
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._kernel.large_batch_step(self._table, *key)
        return self._last[1]
