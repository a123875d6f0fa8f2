"""The decode path as a CPU plays it: the plain rule decides, and kernels read and fill the addresses that it wrote."""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_dymoe.kernels import Activation, ExpertKernel, combine
from vllm_dymoe.residency.decision import Decision, Grouped
from vllm_dymoe.residency.decode_ahead import Copies, name_ahead_plain
from vllm_dymoe.residency.decode_rule import decide_plain
from vllm_dymoe.residency.format import Expert, Format
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.residency.table import Table
from vllm_dymoe.residency.wide_rule import WideShape, WideWork, plan_wide_plain


class PlainDecode:
    """A layer's decode step on a CPU, for tests of everything around it."""

    name = "decided and fetched as a device would, by the host"

    def __init__(self, kernel: ExpertKernel, formats: Mapping[int, Format]) -> None:
        self.kernel, self._formats = kernel, {fmt.code.tag: fmt for fmt in formats.values()}

    def forward(
        self,
        table: Table,
        layer: int,
        rows: Tensor,
        decision: Decision,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: Activation,
    ) -> Tensor:
        self.decide(table, layer, ids, weights, rows, decision)
        out = x.new_empty((ids.numel(), x.shape[1]))
        items = range(int(decision.count))
        bounds = [0, *decision.work[: len(items), 2].tolist()]
        host = Grouped(list(items), bounds, *(of[: bounds[-1]].long() for of in (decision.rows, decision.pairs)))
        step = Decision.of_routing(host, items)
        for item in items:
            step.place(item, self.expert(decision, item))
        self.kernel.begin(x, step, out, activation)
        self.kernel.compute(items)
        if int(decision.computed.sum()) == ids.numel():
            return combine(out, weights)
        return combine(out, weights, torch.where(decision.computed > 0, ids, -1))

    decide = staticmethod(decide_plain)

    name_ahead = staticmethod(name_ahead_plain)

    def fetch_ahead(self, copies: Copies) -> None:
        self.copy_spans(copies.spans)

    def wide_step(self, table: Table, shape: WideShape, activation: Activation) -> "PlainWide":
        return PlainWide(self, table, shape, activation)

    def copy_spans(self, spans: Tensor) -> None:
        """Copy int64 [any, 3]: from where, to where, and how many bytes."""
        for source, destination, nbytes in spans.tolist():
            if nbytes:
                self.fetch(memory_at(source, nbytes), memory_at(destination, nbytes))

    def expert(self, decision: Decision, item: int, *, through: bool = True) -> Expert:
        """One item, once its bytes are where they are to be kept; or where it is read, if nothing is read through."""
        gate, up, down = (self._matrix(decision, item, projection, through) for projection in range(3))
        return Expert(gate, up, down)

    def _matrix(self, decision: Decision, item: int, projection: int, through: bool) -> PackedMatrix:
        matrix = self._formats[int(decision.bits[item, projection])].matrices[projection]
        if not matrix.nested:
            return matrix.view(self._section(decision, (0, item, projection), matrix, through))
        base = matrix.base.view(self._section(decision, (0, item, projection), matrix.base, through))
        return matrix.view(self._section(decision, (1, item, projection), matrix, through), base)

    def _section(self, decision: Decision, at: tuple[int, int, int], matrix: MatrixFormat, through: bool) -> Tensor:
        section = memory_at(int(decision.addresses[at]), matrix.nbytes)
        destination = int(decision.destinations[at]) if through else 0
        return self.fetch(section, memory_at(destination, matrix.nbytes)) if destination else section

    def fetch(self, source: Tensor, destination: Tensor) -> Tensor:
        """Copy a section, or some, to a slot; returns the copy."""
        return destination.copy_(source)


class PlainWide:
    """A wide step on a CPU, group by group; see :class:`vllm_dymoe.runtime.wide_path.WideStep`."""

    _steps = 0, 1 << 30  # one class: positions are in the order of experts

    def __init__(self, owner: PlainDecode, table: Table, shape: WideShape, activation: Activation) -> None:
        self.shape, self._owner, self._table, self._activation = shape, owner, table, activation
        slices = {"slices": shape.slices, "scratch": shape.scratch}
        self._decision = Decision.allocate(shape.tokens, shape.top_k, shape.experts, "cpu", **slices)
        self._wide = WideWork.allocate(shape, self._steps, "cpu")
        self.ids = self._wide.ids

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None,
    ) -> None:  # fmt: skip
        decision, owner = self._decision, self._owner
        owner.decide(self._table, layer, ids, weights, rows, decision, wide=True, marks=marks)
        self._groups = plan_wide_plain(
            self._table, layer, ids, decision, self.shape, half, ahead, self._steps, self._wide
        )
        items = list(range(int(decision.count)))
        bounds = [0, *decision.work[: len(items), 2].tolist()]
        host = Grouped(items, bounds, *(of[: bounds[-1]].long() for of in (decision.rows, decision.pairs)))
        self._step, self._weights = Decision.of_routing(host, items), weights
        self._out = x.new_empty((ids.numel(), x.shape[1]))
        owner.kernel.begin(x, self._step, self._out, self._activation)

    def copy(self, group: int) -> None:
        self._owner.copy_spans(self._wide.spans[self.shape.spans(group)])

    def compute(self, group: int) -> None:
        items = (self._groups == group).nonzero()[0].tolist()
        for item in items:
            self._step.place(item, self._owner.expert(self._decision, item, through=False))
        self._owner.kernel.compute(items)

    def finish(self) -> Tensor:
        return combine(self._out, self._weights, self.ids)


def memory_at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: memory of this process, which must outlive the view."""
    if nbytes == 0:  # a gate that experts do not have
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
