"""Small batches with device-side planning: a layer's step in three launches.

See docs/architecture.md. The launches use fixed memory and need no value from the host, so a whole step can be
captured in a CUDA graph. Budget, quotas, precisions and retention are values in the table; the graph stays valid when
they change.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.executor.device_prefetch import DevicePrefetch, PrefetchKernel
from vllm_dymoe.executor.disk_queue import DiskQueue
from vllm_dymoe.executor.large_batch import CapturedSteps, LargeBatches, LargeBatchKernel
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.constants import PROJECTIONS, SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import MOST_PARTS, crowded_tokens, small_batch_parts
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.prefetch import PrefetchList, set_prefetch
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.on_device import DevicePredictor
from vllm_dymoe.prefetch.pace import StepPace


class SmallBatchKernel(LargeBatchKernel, PrefetchKernel, Protocol):
    """Plans and computes one layer's step on a device."""

    name: str  # name of the implementation, for logs and reports

    def forward(
        self,
        table: Table,  # which experts are where; rewritten
        layer: int,  # position among the MoE layers
        rows: Tensor,  # int32 [1], how many of the rows are tokens; the others become zeros
        plan: LayerPlan,  # overwritten, with room for the rows of x
        x: Tensor,  # [rows, hidden] bfloat16 or float16
        weights: Tensor,  # float32 [rows, top_k]
        ids: Tensor,  # int [rows, top_k], negative where another rank has the expert
        activation: Activation,
        cpu_queue: CpuQueue | None,  # CPU worker for misses; None if all are fetched
        *,
        weights_on_input: bool = False,  # weights multiply the experts' inputs, not their outputs
        global_ids: Tensor | None = None,  # int [rows, top_k], see ``plan_small_batch``
    ) -> Tensor:
        """Enqueue plan, fetches and computation.

        Returns:
            [rows, hidden], the weighted sum over each token's experts.
        """
        ...

    def with_disk(self, disk_queue: DiskQueue) -> "SmallBatchKernel":
        """Return the same kernels with a thread that brings what plans miss into memory."""
        ...


class StepMemory:
    """What captured graphs read and write.

    It is allocated once per server, so that a resize moves none of it. With ``recorded``, each layer has a plan of its
    own, which stays readable until the next step.

    Attributes:
        table: on the device; between two steps the host changes values in it.
        plans: for each layer, or for all of them, a view of its plan for each number of rows; slicing costs host time.
        rows: int32 [1], how many rows are tokens. It is the first element of ``told``, unless a step writes another
            number (:meth:`SmallBatches.meet`).
        told: int32 [2]; :meth:`SmallBatches.tell` writes its number into both elements.
        firsts: int32 [parts, 1], the first rows of the small steps that replace a large one.
        of_parts: int32 [parts, 4], the row counts of these steps in column 0, with the alignment of ``rows``.
        captured: the large-batch steps of captured graphs.
        predictor: predicts experts in small-batch steps; None without predictions.
        listed: copies of predicted experts.
    """

    def __init__(
        self, experts: ModelExperts, table: Table, device: torch.device, *, recorded: bool = False,
        predictor: DevicePredictor | None = None,
    ) -> None:  # fmt: skip
        self.experts, self.table, self.device, layers = experts, table, device, table.layers if recorded else 1
        sizes = SMALL_BATCH_ROWS, experts.top_k, experts.num_experts, device
        self.plans = [
            [scratch.of(rows, experts.num_experts) for rows in range(SMALL_BATCH_ROWS + 1)]
            for scratch in (LayerPlan.allocate(*sizes, slices=1 + table.nested) for _ in range(layers))
        ]
        self.told = torch.zeros(2, dtype=torch.int32, device=device)
        self.rows = self.told[:1]
        self.firsts = torch.arange(MOST_PARTS, dtype=torch.int32, device=device).mul_(SMALL_BATCH_ROWS).view(-1, 1)
        self.of_parts = torch.zeros(MOST_PARTS, 4, dtype=torch.int32, device=device)
        self.captured: CapturedSteps = {}
        self.predictor = predictor
        named = 0 if predictor is None else experts.num_experts
        self.listed = PrefetchList.allocate(named, device, layers=table.layers, slices=1 + table.nested)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the table and the plans.

        Slots, scratch and predictor are counted elsewhere.
        """
        tensors = *vars(self.table).values(), self.told, self.firsts, self.of_parts
        tensors += tuple(tensor for of_layer in self.plans for tensor in of_layer[-1].tensors.values())
        tensors += tuple(vars(self.listed).values())
        return sum(tensor.nbytes for tensor in tensors)


class SmallBatches:
    """Every MoE layer of one rank in device-planned steps.

    An object is for one allocation of slots and one policy. A resize or a change of policy builds a new one on the
    same memory, so captured graphs stay valid.

    Args:
        memory: outlives this object.
        quotas: slots of each layer, by LOW and HIGH of the precisions in use.
        staging: number of staging slots of each precision in use, for each kind of layers.
        cpu_queue: the CPU worker for misses; None if all are fetched.
        costs: ``Table.cpu_costs`` if large-batch steps may run as small ones (all experts in one precision), else
            None.
        count: see :class:`LargeBatches`.
        projections: how many projections of a predicted expert are fetched; 0 to fetch nothing ahead.
        pace: decides between steps whether the next one prefetches; None if all do.
        spare: number of staging slots of each precision that steps leave to moves of versions.
        overlaps: experts arrive while others are computed; without, every step is a large batch.
        foresees: experts are copied before their layer is routed; False where their addresses become known with a
            plan.

    Attributes:
        most_rows: the most rows of a small batch.
        large: runs prompts and steps of more rows.
    """

    def __init__(
        self, memory: StepMemory, kernel: SmallBatchKernel, branch: Branch, quotas: Mapping[int, Sequence[int]],
        staging: Mapping[int, int], *, cpu_queue: CpuQueue | None = None, costs: NDArray[np.int64] | None = None,
        count: Callable[[int, Tensor, Tensor], None] | None = None, projections: int = PROJECTIONS,
        pace: StepPace | None = None, foresees: bool = True, spare: Mapping[int, int] = MappingProxyType({}),
        overlaps: bool = True,
    ) -> None:  # fmt: skip
        self.memory, self.table, self.kernel = memory, memory.table, kernel
        self.cpu_queue, self.costs, self.most_rows = cpu_queue, costs, SMALL_BATCH_ROWS if overlaps else 0
        experts, table, rows = memory.experts, memory.table, memory.rows
        self._plans, slots = memory.plans, (quotas, staging, experts.kinds, memory.captured)
        self._layers = layers = len(experts.layers) - experts.draft_layers  # of the model; a draft's come after them
        self.large = LargeBatches(
            experts.top_k, layers, table, kernel, branch, rows, *slots, count, foresees=foresees, overlaps=overlaps
        )
        self.prefetch: DevicePrefetch | None = None
        set_prefetch(table, {}, spare)
        if memory.predictor is not None:  # also without slots: a graph that is captured now is replayed with some
            ahead = staging if projections and foresees and overlaps else {}
            how = memory.predictor, memory.listed, projections, ahead, layers, pace
            self.prefetch = DevicePrefetch(table, kernel, branch, rows, *how)
        self._told = -1  # unknown, because an earlier object may have set it

    def warm_up(self, activation: Activation, *, weights_on_input: bool = False) -> None:
        """Compile and load all kernels by running steps without tokens.

        So neither a request nor a capture waits for a compiler.
        """
        experts, device = self.memory.experts, self.memory.device
        fmt = next(iter(experts.formats.values()))  # all layers have its width and dtype
        if self.cpu_queue is not None:
            self.cpu_queue.serve(activation)
        most = max(SMALL_BATCH_ROWS + 1, crowded_tokens(experts.top_k, experts.num_experts))
        x = torch.zeros(most, fmt.hidden, dtype=fmt.dtype, device=device)
        weights, ids = (
            torch.zeros(len(x), experts.top_k, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)
        )
        for kind in range(len(experts.of_kinds)):
            layer = experts.kinds.index(kind)
            for rows in (1, SMALL_BATCH_ROWS):  # kernels of up to 8 rows, and of more
                given = x[:rows], weights[:rows], ids[:rows], activation
                self.run(layer, *given, weights_on_input=weights_on_input, global_ids=ids[:rows])
            self.large.warm_up(layer, x, weights, ids, activation, weights_on_input=weights_on_input)
        if self.prefetch is not None:
            self.prefetch.warm_up(x[:1], ids[:1])
        self.settle()

    def begin_step(self, tokens: int, *, large: bool) -> None:
        """Begin a step of requests: of so many tokens, as a small batch or a large one."""
        self.settle()
        if self.prefetch is not None:
            self.prefetch.begin_step(0 if large else tokens)
        self.tell(tokens)

    def tell(self, rows: int) -> None:
        """Set how many rows are tokens in what is launched or replayed next.

        Args:
            rows: number of tokens, 0 for a step without requests. All rows of a layer that has fewer are tokens.
        """
        if rows != self._told:
            memory, self._told = self.memory, rows
            memory.told.fill_(rows)
            self._divide()

    def _divide(self) -> None:
        if self.costs is not None:
            self.memory.of_parts.copy_(self.memory.rows - self.memory.firsts).clamp_(0, SMALL_BATCH_ROWS)

    def meet(self, ids: Tensor) -> None:
        """Set from the device how many of a layer's rows are tokens.

        It is for layers where the rows of several engines meet.

        Args:
            ids: int [rows, top_k], experts of all ranks; all -1 in rows that are no tokens, which may be anywhere. If
                any row is a token, all rows count.
        """
        torch.mul((ids != -1).any(), len(ids), out=self.memory.rows[0])
        self._divide()

    def own_tokens(self, ids: Tensor, first: int = 0) -> Tensor:
        """Return ids with -1 in the rows that are no tokens of this rank.

        :meth:`tell` says which rows are tokens.

        Args:
            ids: int [rows, top_k].
            first: number of the first row among those of the step.
        """
        number = torch.arange(first, first + len(ids), device=ids.device).unsqueeze(1)
        return torch.where(number < self.memory.told[1], ids, -1)

    def forward(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation,
        *, weights_on_input: bool = False, global_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a layer of a small batch: x [rows, hidden] to [rows, hidden].

        Args:
            global_ids: int [rows, top_k], the same choices as the router numbers them; read if precision is chosen
                among the experts of all ranks (``Table.all_experts``).
        """
        self.large.settle()
        prefetch = self.prefetch if layer < self._layers else None  # a draft's layers are not predicted
        if prefetch is not None:
            prefetch.begin_layer(layer, x, ids)
        given = x, weights, ids, activation
        out = self.run(layer, *given, weights_on_input=weights_on_input, global_ids=global_ids)
        if prefetch is not None:
            prefetch.end_layer(layer)
        return out

    def run(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation,
        *, rows: Tensor | None = None, weights_on_input: bool = False, global_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a layer of a small batch without predictions.

        While a model loads, gates may not exist yet to predict with.

        Args:
            rows: int32 [1], how many rows are tokens; None for ``StepMemory.rows``.
            global_ids: see :meth:`forward`.
        """
        plan, rows = self._plans[layer % len(self._plans)][len(x)], self.memory.rows if rows is None else rows
        return self.kernel.forward(
            self.table, layer, rows, plan, x, weights, ids, activation, self.cpu_queue,
            weights_on_input=weights_on_input, global_ids=global_ids if self.table.all_experts else None,
        )  # fmt: skip

    def forward_large(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation, marks: Tensor | None = None,
        *, captured: bool = False, weights_on_input: bool = False, global_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run a layer of a large-batch step, see :meth:`LargeBatches.forward`.

        It runs as several small-batch steps in sequence, if the CPU executes misses and this is faster. For global_ids
        see :meth:`forward`.
        """
        if self.prefetch is not None:
            self.prefetch.settle()
            self.prefetch.observe(layer, x, ids)
        parts, experts = 0, self.table.experts
        if self.costs is not None and marks is None and self.most_rows:
            sizes = len(x), SMALL_BATCH_ROWS, ids.shape[1], experts
            parts = small_batch_parts(*sizes, self.large.most_streamed / experts, self.costs)
        if not parts:
            return self.large.forward(
                layer, x, weights, ids, activation, marks, captured=captured, weights_on_input=weights_on_input,
                global_ids=global_ids,
            )  # fmt: skip
        self.large.settle()
        outs = []
        for part, rows in enumerate(self.memory.of_parts[:parts]):
            some = slice(part * SMALL_BATCH_ROWS, (part + 1) * SMALL_BATCH_ROWS)
            told: dict[str, Any] = {"rows": rows[:1], "weights_on_input": weights_on_input}
            told["global_ids"] = None if global_ids is None else global_ids[some]
            outs.append(self.run(layer, x[some], weights[some], ids[some], activation, **told))
        return torch.cat(outs)

    def actions(self, layer: int, ids: Tensor) -> Tensor | None:
        """Return :meth:`~.LayerPlan.actions` of a layer of the last small-batch step.

        None without recorded plans.
        """
        if len(self._plans) < self.table.layers:
            return None
        return self._plans[layer][-1].actions(ids, self.table.experts)

    def settle(self) -> None:
        """Begin a step: forget experts that an earlier one copied ahead."""
        self.large.settle()
        if self.prefetch is not None:
            self.prefetch.settle()
        if self.cpu_queue is not None and self.cpu_queue.failed:
            self.table.cpu_costs.zero_()  # from now on everything is fetched
            self.costs = None
