"""Small batches with device-side planning: a layer's step in three launches (docs/architecture.md).

The launches use fixed memory and need no value from the host, so a whole step can be captured in a CUDA graph. Budget,
quotas, precisions and retention are values in the table; the graph stays valid when they change.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.executor.copy_branch import Branch
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.executor.device_prefetch import DevicePrefetch, PrefetchKernel
from vllm_dymoe.executor.large_batch import LargeBatches, LargeBatchKernel
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.large_batch import MOST_PARTS, small_batch_parts
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.prefetch import PrefetchList, prefetch_slots, set_prefetch
from vllm_dymoe.planner.table import Table
from vllm_dymoe.policies.base import PrefetchPolicy
from vllm_dymoe.prefetch.on_device import DevicePredictor


class SmallBatchKernel(LargeBatchKernel, PrefetchKernel, Protocol):
    """Plans and computes one layer's step on a device."""

    name: str  # which implementation, for logs and reports
    cpu_queue: CpuQueue | None  # the CPU worker of misses; None if all are fetched

    def forward(
        self,
        table: Table,  # which experts are where; rewritten
        layer: int,  # position among the MoE layers
        rows: Tensor,  # int32 [1], how many of the rows are tokens; the others come out as zeros
        plan: LayerPlan,  # overwritten, with room for the rows of x
        x: Tensor,  # [rows, hidden] bfloat16 or float16
        weights: Tensor,  # float32 [rows, top_k]
        ids: Tensor,  # int [rows, top_k], negative where another rank has the expert
        activation: Activation,
    ) -> Tensor:
        """Enqueue plan, fetches and computation; return [rows, hidden], the weighted sum over each token's experts."""
        ...


class SmallBatches:
    """Every MoE layer of one rank in steps that the device plans; ``large`` runs prompts and steps of more rows.

    With ``recorded``, each layer has a plan of its own, which stays readable until the next step. ``prefetch`` names
    experts ahead, if it can on a device.
    """

    def __init__(
        self, experts: ModelExperts, table: Table, kernel: SmallBatchKernel, device: torch.device, branch: Branch,
        *, recorded: bool = False, prefetch: PrefetchPolicy | None = None,
    ) -> None:  # fmt: skip
        self.table, self.kernel, self._branch = table, kernel, branch
        self._experts, self._device, layers = experts, device, table.layers if recorded else 1
        sizes = SMALL_BATCH_ROWS, experts.top_k, experts.num_experts, device
        # A view of the plan for each number of rows, made once, because slicing costs host time.
        self._plans = [
            [scratch.of(rows, experts.num_experts) for rows in range(SMALL_BATCH_ROWS + 1)]
            for scratch in (LayerPlan.allocate(*sizes, slices=1 + table.nested) for _ in range(layers))
        ]
        self._rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.large = LargeBatches(experts, table, kernel, branch, self._rows)
        # First rows and row counts of the small steps that replace a large one, with the alignment of `rows`.
        self._firsts = torch.arange(MOST_PARTS, dtype=torch.int32, device=device).mul_(SMALL_BATCH_ROWS).view(-1, 1)
        self._of_parts = torch.zeros(MOST_PARTS, 4, dtype=torch.int32, device=device)
        self._told = 0
        self.predictor: DevicePredictor | None = None
        if prefetch is not None and prefetch.on_device is not None and not table.nested:
            self.predictor = prefetch.on_device(table, experts.top_k)
            self._listed = PrefetchList.allocate(experts.num_experts, device)
            self._projections = prefetch.projections
        self.prefetch: DevicePrefetch | None = None
        self.costs: NDArray[np.int64] | None = None
        """``Table.cpu_costs`` if large-batch steps may run as small ones (all experts in one precision), else None."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the table and the plans; slots and scratch are counted elsewhere."""
        cpu_queue = self.kernel.cpu_queue
        tensors = *vars(self.table).values(), self._rows, self._firsts, self._of_parts
        tensors += tuple(tensor for of_layer in self._plans for tensor in of_layer[-1].tensors.values())
        if self.predictor is not None:
            tensors += tuple(vars(self._listed).values())
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return sum(tensor.nbytes for tensor in tensors) + predictor + (0 if cpu_queue is None else cpu_queue.nbytes)

    def set_slots(self, staging: Mapping[int, int], quotas: Mapping[int, Sequence[int]]) -> None:
        """Serve with other slots: the number of staging slots, and the quota of each layer, by LOW and HIGH."""
        self.settle()
        self.large.set_slots(staging, quotas)
        self.prefetch = None
        if self.predictor is not None and any(map(prefetch_slots, staging.values())):
            given = self.table, self.kernel, self._branch, self._rows, self.predictor, self._listed, self._projections
            self.prefetch = DevicePrefetch(*given)
        set_prefetch(self.table, enabled=self.prefetch is not None)

    def warm_up(self, activation: Activation) -> None:
        """Compile and load all kernels by running steps without tokens, so that no request or capture waits."""
        fmt, top_k = next(iter(self._experts.formats.values())), self._experts.top_k
        if self.kernel.cpu_queue is not None:
            self.kernel.cpu_queue.serve(activation)
        x = torch.zeros(SMALL_BATCH_ROWS + 1, fmt.hidden, dtype=fmt.dtype, device=self._device)
        weights, ids = (
            torch.zeros(len(x), top_k, dtype=dtype, device=self._device) for dtype in (torch.float32, torch.int32)
        )
        self.forward(0, x[:1], weights[:1], ids[:1], activation)
        self.large.warm_up(x, weights, ids, activation)
        self.settle()

    def tell(self, rows: int) -> None:
        """Set how many rows are tokens in what is launched or replayed next; 0 for a step without requests."""
        if rows != self._told:
            self._rows.fill_(rows)
            if self.costs is not None:
                self._of_parts.copy_(self._rows - self._firsts).clamp_(0, SMALL_BATCH_ROWS)
            self._told = rows

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
        self.large.settle()
        plan, prefetch = self._plans[layer % len(self._plans)][len(x)], self.prefetch
        if prefetch is not None:
            prefetch.begin_layer(layer, x, ids)
        out = self.kernel.forward(self.table, layer, self._rows, plan, x, weights, ids, activation)
        if prefetch is not None:
            prefetch.end_layer(layer)
        return out

    def forward_large(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation, marks: Tensor | None = None,
        *, captured: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run a layer of a large-batch step, see :meth:`LargeBatches.forward`.

        It runs as several small-batch steps, one after another, if the CPU executes misses and this is faster.
        """
        if self.prefetch is not None:
            self.prefetch.settle()
            self.prefetch.observe(layer, x, ids)
        parts, experts = 0, self.table.experts
        if self.costs is not None and marks is None:
            sizes = len(x), SMALL_BATCH_ROWS, ids.shape[1], experts
            parts = small_batch_parts(*sizes, self.large.passing / experts, self.costs)
        if not parts:
            return self.large.forward(layer, x, weights, ids, activation, marks, captured=captured)
        self.large.settle()
        plans, outs = self._plans[layer % len(self._plans)], []
        for part, rows in enumerate(self._of_parts[:parts]):
            some = slice(part * SMALL_BATCH_ROWS, (part + 1) * SMALL_BATCH_ROWS)
            given, plan = (x[some], weights[some], ids[some]), plans[len(x[some])]
            outs.append(self.kernel.forward(self.table, layer, rows[:1], plan, *given, activation))
        return torch.cat(outs)

    def actions(self, layer: int, ids: Tensor) -> Tensor | None:
        """Return :meth:`~.LayerPlan.actions` of a layer of the last small-batch step; None without recorded plans."""
        if len(self._plans) < self.table.layers:
            return None
        return self._plans[layer][-1].actions(ids, self.table.experts)

    def settle(self) -> None:
        """Begin a step: forget what an earlier one copied ahead."""
        self.large.settle()
        if self.prefetch is not None:
            self.prefetch.settle()
        if (cpu_queue := self.kernel.cpu_queue) is not None and cpu_queue.failed:
            self.table.cpu_costs.zero_()  # from now on everything is fetched
            self.costs = None
