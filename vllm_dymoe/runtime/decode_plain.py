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


class PlainDecode:
    """A layer's decode step on a CPU, for tests of everything around it.

    Args:
        kernel: computes.
        formats: of experts, by bit-width.
    """

    name = "decided and fetched as a device would, by the host"

    def __init__(self, kernel: ExpertKernel, formats: Mapping[int, Format]) -> None:
        self._kernel, self._formats = kernel, {fmt.code.tag: fmt for fmt in formats.values()}

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
        """See :class:`vllm_dymoe.runtime.decode_path.DecodeKernel`."""
        self.decide(table, layer, ids, weights, rows, decision)
        out = x.new_empty((ids.numel(), x.shape[1]))
        items = range(int(decision.count))
        bounds = [0, *decision.work[: len(items), 2].tolist()]
        host = Grouped(list(items), bounds, *(of[: bounds[-1]].long() for of in (decision.rows, decision.pairs)))
        step = Decision.of_routing(host, items)
        for item in items:
            step.place(item, self._expert(decision, item))
        self._kernel.begin(x, step, out, activation)
        self._kernel.compute(items)
        if int(decision.computed.sum()) == ids.numel():
            return combine(out, weights)
        return combine(out, weights, torch.where(decision.computed > 0, ids, -1))

    decide = staticmethod(decide_plain)

    name_ahead = staticmethod(name_ahead_plain)

    def fetch_ahead(self, copies: Copies) -> None:
        """See :class:`vllm_dymoe.runtime.ahead.AheadKernel`."""
        for source, destination, nbytes in copies.spans.tolist():
            if nbytes:
                self.fetch(memory_at(source, nbytes), memory_at(destination, nbytes))

    def _expert(self, decision: Decision, item: int) -> Expert:
        """One item, once its bytes are where they are to be kept."""
        gate, up, down = (self._matrix(decision, item, projection) for projection in range(3))
        return Expert(gate, up, down)

    def _matrix(self, decision: Decision, item: int, projection: int) -> PackedMatrix:
        matrix = self._formats[int(decision.bits[item, projection])].matrices[projection]
        if not matrix.nested:
            return matrix.view(self._section(decision, (0, item, projection), matrix))
        base = matrix.base.view(self._section(decision, (0, item, projection), matrix.base))
        return matrix.view(self._section(decision, (1, item, projection), matrix), base)

    def _section(self, decision: Decision, at: tuple[int, int, int], matrix: MatrixFormat) -> Tensor:
        """Where a section is to be read, once it is there."""
        section = memory_at(int(decision.addresses[at]), matrix.nbytes)
        destination = int(decision.destinations[at])
        return self.fetch(section, memory_at(destination, matrix.nbytes)) if destination else section

    def fetch(self, source: Tensor, destination: Tensor) -> Tensor:
        """Copy a section, or some, to a slot; returns the copy."""
        return destination.copy_(source)


def memory_at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: memory of this process, which must outlive the view."""
    if nbytes == 0:  # a gate that experts do not have
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
