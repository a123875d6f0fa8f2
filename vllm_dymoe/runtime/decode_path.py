"""The decode path: a layer's step in three launches over fixed memory, with no host in it (docs/architecture.md).

Nothing depends on a value that the host would have to know, so that a whole step can be captured in a CUDA graph and
replayed for ever: budget, shares, tiers and retention are values in the table.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.kernels import Activation
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.table import Table
from vllm_dymoe.residency.wide_rule import MOST_PARTS, narrow_parts
from vllm_dymoe.runtime.branch import Branch
from vllm_dymoe.runtime.there import Doorbell
from vllm_dymoe.runtime.wide_path import WideKernel, WidePath

DECODE_ROWS = 16  # most rows of a step that take this path; with more of them tensor cores are worth a wide one


class DecodeKernel(WideKernel, Protocol):
    """Decides and computes one layer's step."""

    name: str  # which implementation, for logs and reports
    doorbell: Doorbell | None  # through which the host computes some misses; None if all are fetched

    def forward(
        self,
        table: Table,  # which experts are where; rewritten
        layer: int,  # position among the MoE layers
        rows: Tensor,  # int32 [1], how many of the rows are tokens; the others come out as zeros
        decision: Decision,  # scratch for as many rows as x has
        x: Tensor,  # [rows, hidden] bfloat16 or float16
        weights: Tensor,  # float32 [rows, top_k]
        ids: Tensor,  # int [rows, top_k], negative where another rank has the expert
        activation: Activation,
    ) -> Tensor:
        """Decide, fetch and compute, without waiting: [rows, hidden], the sum over each token's experts on this
        rank."""
        ...


class DecodePath:
    """Every MoE layer of one rank, in steps that need no host: narrow ones here, others and prompts are ``wide``.
    If they are ``recorded``, decisions of all layers are kept until the next step."""

    def __init__(
        self, experts: ModelExperts, table: Table, kernel: DecodeKernel, device: torch.device, branch: Branch,
        *, recorded: bool = False,
    ) -> None:  # fmt: skip
        self.table, self.kernel = table, kernel
        self._experts, self._device, layers = experts, device, table.layers if recorded else 1
        sizes = DECODE_ROWS, experts.top_k, experts.num_experts, device
        # One for each number of rows, made once: slices are host work, too.
        self._decisions = [
            [scratch.of(rows, experts.num_experts) for rows in range(DECODE_ROWS + 1)]
            for scratch in (Decision.allocate(*sizes, slices=1 + table.nested) for _ in range(layers))
        ]
        self._rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.wide = WidePath(experts, table, kernel, branch, self._rows)
        # Those of narrow steps in place of a wide one, on addresses as even as that of `rows`.
        self._firsts = torch.arange(MOST_PARTS, dtype=torch.int32, device=device).mul_(DECODE_ROWS).view(-1, 1)
        self._of_parts = torch.zeros(MOST_PARTS, 4, dtype=torch.int32, device=device)
        self._told = 0
        self.costs: NDArray[np.int64] | None = None
        """``Table.there`` where wide steps may be computed in narrow ones: all experts are wanted in one version."""

    @property
    def nbytes(self) -> int:
        """Device memory of the table and of what is decided; slots and scratch are counted elsewhere."""
        doorbell = self.kernel.doorbell
        tensors = *vars(self.table).values(), self._rows, self._firsts, self._of_parts
        tensors += tuple(tensor for of_layer in self._decisions for tensor in of_layer[-1].tensors.values())
        return sum(tensor.nbytes for tensor in tensors) + (0 if doorbell is None else doorbell.nbytes)

    def warm_up(self, activation: Activation) -> None:
        """Compile and load what layers will launch, by a step without tokens: neither requests nor captures wait."""
        fmt, top_k = next(iter(self._experts.formats.values())), self._experts.top_k
        if self.kernel.doorbell is not None:
            self.kernel.doorbell.serve(activation)
        x = torch.zeros(DECODE_ROWS + 1, fmt.hidden, dtype=fmt.dtype, device=self._device)
        weights, ids = (
            torch.zeros(len(x), top_k, dtype=dtype, device=self._device) for dtype in (torch.float32, torch.int32)
        )
        self.forward(0, x[:1], weights[:1], ids[:1], activation)
        self.wide.warm_up(x, weights, ids, activation)
        self.settle()

    def tell(self, rows: int) -> None:
        """How many rows are tokens in what is launched or replayed from now on; 0 for a step without requests."""
        if rows != self._told:
            self._rows.fill_(rows)
            if self.costs is not None:
                self._of_parts.copy_(self._rows - self._firsts).clamp_(0, DECODE_ROWS)
            self._told = rows

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
        self.wide.settle()
        decision = self._decisions[layer % len(self._decisions)][len(x)]
        return self.kernel.forward(self.table, layer, self._rows, decision, x, weights, ids, activation)

    def forward_wide(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation, marks: Tensor | None = None,
        *, captured: bool = False,
    ) -> Tensor:  # fmt: skip
        """A layer of a step of more rows, see :meth:`WidePath.forward`; in narrow steps one behind the other where the
        host computes misses and these end first."""
        parts, experts = 0, self.table.experts
        if self.costs is not None and marks is None:
            sizes = len(x), DECODE_ROWS, ids.shape[1], experts
            parts = narrow_parts(*sizes, self.wide.passing / experts, self.costs)
        if not parts:
            return self.wide.forward(layer, x, weights, ids, activation, marks, captured=captured)
        self.wide.settle()
        decisions, outs = self._decisions[layer % len(self._decisions)], []
        for part, rows in enumerate(self._of_parts[:parts]):
            some = slice(part * DECODE_ROWS, (part + 1) * DECODE_ROWS)
            given, decision = (x[some], weights[some], ids[some]), decisions[len(x[some])]
            outs.append(self.kernel.forward(self.table, layer, rows[:1], decision, *given, activation))
        return torch.cat(outs)

    def fates(self, layer: int, ids: Tensor) -> Tensor | None:
        """Of a layer of the last narrow step, as :meth:`~.Decision.fates`; None where decisions are not recorded."""
        if len(self._decisions) < self.table.layers:
            return None
        return self._decisions[layer][-1].fates(ids, self.table.experts)

    def settle(self) -> None:
        """A step begins: no other one finds what a wide one has copied ahead."""
        self.wide.settle()
        if (doorbell := self.kernel.doorbell) is not None and doorbell.failed:
            self.table.there.zero_()  # from now on everything is fetched
            self.costs = None
