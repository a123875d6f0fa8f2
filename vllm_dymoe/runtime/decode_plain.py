"""The decode path as a CPU plays it: the plain rule decides, and kernels read and fill the addresses that it wrote."""

import ctypes
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_dymoe.kernels import Activation, ExpertKernel, combine
from vllm_dymoe.kernels.doorbell import collect_plain, post_plain
from vllm_dymoe.residency.constants import Fate
from vllm_dymoe.residency.decision import Decision, Grouped
from vllm_dymoe.residency.decode_rule import decide_plain
from vllm_dymoe.residency.format import Expert, Format
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.residency.table import Table
from vllm_dymoe.residency.wide_rule import THERE, WideShape, WideWork, plan_wide_plain
from vllm_dymoe.runtime.there import Doorbell
from vllm_dymoe.store.disk import sleep_until


class PlainDecode:
    """A layer's decode step on a CPU, for tests of everything around it; behind an emulated link of so many 1e9 bytes
    per second, for which hits do not wait."""

    name = "decided and fetched as a device would, by the host"
    doorbell: Doorbell | None = None

    def __init__(self, kernel: ExpertKernel, formats: Mapping[int, Format], link_gbps: float | None = None) -> None:
        self._seconds_per_byte, self._free = 1e-9 / link_gbps if link_gbps else 0.0, 0.0
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
        begun, doorbell, real = time.perf_counter(), self.doorbell, int(rows)
        if doorbell is not None:
            doorbell.serve(activation)
            post_plain(doorbell.ring, doorbell.turn, layer, x[:real], ids[:real], decision)
        step, out = self.begin(x, decision, activation)
        fates = decision.fate[:, : int(decision.count)]
        hits, there = (fates == Fate.HIT).all(0), (fates == Fate.THERE).any(0)
        for part in (hits, ~hits & ~there) if self._seconds_per_byte else (~there,):
            some = part.nonzero().flatten().tolist()
            sleep_until(self.arrival(sum(self.place(step, decision, item) for item in some), begun))
            self.kernel.compute(some)
        if doorbell is not None:
            collect_plain(doorbell.ring, doorbell.turn, out, decision.computed)
        if int((decision.computed > 0).sum()) == ids.numel():
            return combine(out, weights)
        return combine(out, weights, torch.where(decision.computed > 0, ids, -1))

    def begin(self, x: Tensor, decision: Decision, activation: Activation) -> tuple[Decision, Tensor]:
        """Begin the kernel's step of what was decided, whose outputs are the second."""
        items, positions = list(range(int(decision.count))), int((decision.computed > 0).sum())
        bounds = [*decision.work[: len(items), 1].tolist(), positions]
        host = Grouped(items, bounds, *(of[:positions].long() for of in (decision.rows, decision.pairs)))
        step, out = Decision.of_routing(host, items), x.new_empty(decision.computed.numel(), x.shape[1])
        self.kernel.begin(x, step, out, activation)
        return step, out

    decide = staticmethod(decide_plain)

    def wide_step(self, table: Table, shape: WideShape, activation: Activation) -> "PlainWide":
        return PlainWide(self, table, shape, activation)

    def copy_spans(self, spans: Tensor) -> None:
        """Copy int64 [any, 3]: from where, to where, and how many bytes."""
        for source, destination, nbytes in spans.tolist():
            if nbytes:
                self.fetch(memory_at(source, nbytes), memory_at(destination, nbytes))

    def place(self, step: Decision, decision: Decision, item: int, *, through: bool = True) -> int:
        """Say where an item is, once its bytes are where they are to be kept; or where it is read, if nothing is read
        through. Returns how many bytes the kernel reads over the link."""
        gate, up, down = (self._matrix(decision, item, projection, through) for projection in range(3))
        step.place(item, Expert(gate, up, down))
        widths = [self._formats[int(decision.bits[item, projection])].matrices[projection] for projection in range(3)]
        slices = [[m.base.nbytes, m.nbytes] if m.nested else [m.nbytes] for m in widths]
        fates = (Fate.KEEP, Fate.PASS) if through else (Fate.PASS,)
        missed = [fate in fates for fate in decision.fate[:, item].tolist()]
        return sum(nbytes for parts in slices for nbytes, far in zip(parts, missed, strict=False) if far)

    def arrival(self, nbytes: int, asked: float = 0.0) -> float:
        """When bytes asked for at a moment of ``time.perf_counter`` have come over the emulated link."""
        self._free = max(self._free, asked) + nbytes * self._seconds_per_byte
        return self._free if nbytes else 0.0

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
        self.decision = Decision.allocate(shape.tokens, shape.top_k, shape.experts, "cpu", **slices)
        self._wide = WideWork.allocate(shape, self._steps, "cpu")
        self.ids = self._wide.ids
        self._due: dict[int, float] = {}  # when a group is there, behind an emulated link

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None,
    ) -> None:  # fmt: skip
        decision, owner = self.decision, self._owner
        owner.decide(self._table, layer, ids, weights, rows, decision, wide=True, marks=marks)
        self._groups = plan_wide_plain(
            self._table, layer, ids, decision, self.shape, half, ahead, self._steps, self._wide
        )
        self._weights = weights
        self._step, self._out = owner.begin(x, decision, self._activation)

    def copy(self, group: int) -> None:
        spans = self._wide.spans[self.shape.spans(group)]
        self._owner.copy_spans(spans)
        found = not self.shape.passes or group == self.shape.groups  # what is copied ahead the next layer finds
        self._due[THERE if found else group] = self._owner.arrival(int(spans[:, 2].sum()), time.perf_counter())

    def compute(self, group: int) -> None:
        items, owner, read = (self._groups == group).nonzero()[0].tolist(), self._owner, 0
        for item in items:
            read += owner.place(self._step, self.decision, item, through=False)
        if self.shape.passes:
            read = 0  # it was copied
        sleep_until(max(self._due.pop(group, 0.0), owner.arrival(read, time.perf_counter())))
        owner.kernel.compute(items)

    def finish(self) -> Tensor:
        return combine(self._out, self._weights, self.ids)


def memory_at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes]: memory of this process, which must outlive the view."""
    if nbytes == 0:  # a gate that experts do not have
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
