"""The emulated card's kernels.

The NumPy planner plans, and CPU kernels use the addresses that it wrote. This is the plain twin of ``triton_kernels``.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.cache.store.disk import sleep_until
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.executor.disk_queue import DiskQueue
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert
from vllm_dymoe.experts.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.kernels import Activation, CpuKernel, combine
from vllm_dymoe.kernels.cpu_queue import ask_plain, collect_plain, post_plain, take_plain
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.large_batch import RESIDENT, LargeBatchShape, LargeBatchWork, plan_large_batch
from vllm_dymoe.planner.plan import Grouped, LayerPlan
from vllm_dymoe.planner.prefetch import PrefetchList, judge_predicted, list_predicted, publish
from vllm_dymoe.planner.small_batch import plan_small_batch
from vllm_dymoe.planner.table import Table
from vllm_dymoe.planner.weights import weighted_inputs


class _Coming(NamedTuple):
    """Predicted experts on the emulated link."""

    layer: int
    begun: float  # when the link began to carry them
    # When each has crossed the link, its place in ``Table.staged``, and what that says then.
    due: list[tuple[float, int, int]]


class PlainKernels:
    """The SmallBatchKernel of an emulated card.

    With ``link_gbps``, misses wait for a link of that rate.
    """

    name = "planned and fetched as by a device, on the CPU"

    def __init__(
        self, kernel: CpuKernel, formats: Sequence[Mapping[int, ExpertFormat]], link_gbps: float | None = None,
        disk_queue: DiskQueue | None = None,
    ) -> None:  # fmt: skip
        self._disk_queue, self._given = disk_queue, (kernel, formats, link_gbps)
        self._coming: _Coming | None = None
        self._seconds_per_byte, self._free = 1e-9 / link_gbps if link_gbps else 0.0, 0.0
        self.kernel = kernel
        self._of_layers = [
            [
                {matrix.encoding.tag: matrix for matrix in of_projection}
                for of_projection in zip(*(fmt.matrices for fmt in of_layer.values()), strict=True)
            ]
            for of_layer in formats
        ]
        # Of the layer that was planned last: formats of gate, up and down, by their tags.
        self._formats: Sequence[Mapping[int, MatrixFormat]] = ()

    def with_disk(self, disk_queue: DiskQueue) -> "PlainKernels":
        """Return the same kernels with a worker that brings what is missing into memory."""
        return type(self)(*self._given, disk_queue)

    def forward(
        self,
        table: Table,
        layer: int,
        rows: Tensor,
        plan: LayerPlan,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: Activation,
        cpu_queue: CpuQueue | None,
        *,
        weights_on_input: bool = False,
        global_ids: Tensor | None = None,
    ) -> Tensor:
        given = table, layer, ids, weights, rows, plan
        self.decide(*given, weights_on_input=weights_on_input, global_ids=global_ids)
        begun, real = time.perf_counter(), min(int(rows), len(x))
        if cpu_queue is not None:
            cpu_queue.serve(activation)
            scales = weights[:real] if weights_on_input else None
            post_plain(cpu_queue.queue, cpu_queue.turn, layer, x[:real], ids[:real], plan, scales)
        step, out = self.begin(weighted_inputs(x, weights) if weights_on_input else x, plan, activation)
        slots = slot_ranges(table)
        actions = plan.action[:, : int(plan.count)]
        hits, on_cpu = (actions == Action.HIT).all(0), (actions == Action.CPU).any(0)
        parts = [(~on_cpu).nonzero().flatten().tolist()]
        if self._seconds_per_byte:  # hits while misses arrive, and each of those when it has
            parts = [
                hits.nonzero().flatten().tolist(),
                *([item] for item in (~hits & ~on_cpu).nonzero().flatten().tolist()),
            ]
        for some in parts:
            sleep_until(self.arrival(sum(self.place(step, plan, item, slots) for item in some), begun))
            self.kernel.compute(some)
        if cpu_queue is not None:
            collect_plain(cpu_queue.queue, cpu_queue.turn, out, plan.computed)
        if int((plan.computed > 0).sum()) == ids.numel():
            return combine(out, plan.weights)
        return combine(out, plan.weights, torch.where(plan.computed > 0, ids, -1))

    def begin(self, x: Tensor, plan: LayerPlan, activation: Activation) -> tuple[LayerPlan, Tensor]:
        """Start a step for a device-side plan.

        Args:
            x: the rows that the plan names.

        Returns:
            its host-side plan, and its outputs [tokens * top_k, hidden].
        """
        items, positions = list(range(int(plan.count))), int((plan.computed > 0).sum())
        bounds = [*plan.work[: len(items), 1].tolist(), positions]
        host = Grouped(items, bounds, *(of[:positions].long() for of in (plan.rows, plan.pairs)))
        step, out = LayerPlan.of_experts(host), x.new_empty(plan.computed.numel(), x.shape[1])
        self.kernel.begin(x, step, out, activation)
        return step, out

    def decide(
        self, table: Table, layer: int, ids: Tensor, weights: Tensor, rows: Tensor, plan: LayerPlan, **how: Any
    ) -> None:
        """Plan a layer, given the predicted experts that the link has brought by now."""
        if (coming := self._coming) is not None:
            self._coming, now = None, time.perf_counter()
            if coming.layer == layer:
                for due, place, projections in coming.due:
                    if due <= now:
                        publish(table, place, projections)
            self._free = min(self._free, max(coming.begun, now))  # the others are not fetched
        self._formats = self._of_layers[layer]
        plan_small_batch(table, layer, ids, weights, rows, plan, **how)
        if (disk := self._disk_queue) is not None:
            ask_plain(disk.queue, disk.turn, layer, plan)
            take_plain(disk.queue, disk.turn, table, layer, plan)

    list_predicted = staticmethod(list_predicted)
    judge_predicted = staticmethod(judge_predicted)

    def copy_predicted(self, table: Table, layer: int, listed: PrefetchList) -> None:
        begun, due = self._free, []
        for source, destination, nbytes, place, projections in listed.copies[: int(listed.count)].tolist():
            self.fetch(memory_at(source, nbytes), memory_at(destination, nbytes))
            due.append((self.arrival(nbytes, time.perf_counter()), place, projections))
        self._coming = _Coming(layer, begun, due)

    def large_batch_step(
        self, table: Table, shape: LargeBatchShape, activation: Activation, kind: int
    ) -> "PlainLargeBatch":
        return PlainLargeBatch(self, table, shape, activation)

    def copy_spans(self, spans: Tensor) -> None:
        """Carry out copies, int64 [any, 3]: source address, destination address, bytes."""
        for source, destination, nbytes in spans.tolist():
            if nbytes:
                self.fetch(memory_at(source, nbytes), memory_at(destination, nbytes))

    def place(
        self, step: LayerPlan, plan: LayerPlan, item: int, slots: Sequence[range], *, through: bool = True
    ) -> int:
        """Copy an item's bytes to their slot if it has one.

        Their place is set in the step.

        Args:
            slots: addresses of the device's slots; bytes read from elsewhere cross the link.
            through: copy while computing, as the kernels of small batches do; False if copies were made before.

        Returns:
            number of bytes that the kernel reads over the link.
        """
        gate, up, down = (self._matrix(plan, item, projection, through) for projection in range(3))
        step.place(item, PackedExpert(gate, up, down))
        read = 0
        for projection in range(3):
            matrix = self._formats[projection][int(plan.bits[item, projection])]
            parts = (matrix.base, matrix) if matrix.nested else (matrix,)
            for part, address in zip(parts, plan.addresses[:, item, projection].tolist(), strict=False):
                read += 0 if any(address in memory for memory in slots) else part.nbytes
        return read

    def arrival(self, nbytes: int, asked: float = 0.0) -> float:
        """Return when bytes have crossed the emulated link.

        Args:
            nbytes: how many bytes.
            asked: when they were requested; like the result, a ``time.perf_counter`` value in seconds.
        """
        self._free = max(self._free, asked) + nbytes * self._seconds_per_byte
        return self._free if nbytes else 0.0

    def _matrix(self, plan: LayerPlan, item: int, projection: int, through: bool) -> PackedMatrix:
        matrix = self._formats[projection][int(plan.bits[item, projection])]
        if not matrix.nested:
            return matrix.view(self._section(plan, (0, item, projection), matrix, through))
        base = matrix.base.view(self._section(plan, (0, item, projection), matrix.base, through))
        return matrix.view(self._section(plan, (1, item, projection), matrix, through), base)

    def _section(self, plan: LayerPlan, at: tuple[int, int, int], matrix: MatrixFormat, through: bool) -> Tensor:
        section = memory_at(int(plan.addresses[at]), matrix.nbytes)
        destination = int(plan.destinations[at]) if through else 0
        return self.fetch(section, memory_at(destination, matrix.nbytes)) if destination else section

    def fetch(self, source: Tensor, destination: Tensor) -> Tensor:
        """Copy bytes to a slot; return the copy."""
        return destination.copy_(source)


class PlainLargeBatch:
    """The ``LargeBatchStep`` of an emulated card.

    See :class:`~vllm_dymoe.executor.large_batch.LargeBatchStep`.
    """

    _steps = 0, 1 << 30  # a single class, so positions are in the order of experts

    def __init__(self, owner: PlainKernels, table: Table, shape: LargeBatchShape, activation: Activation) -> None:
        self.shape, self._owner, self._table, self._activation = shape, owner, table, activation
        slices = {"slices": shape.slices, "scratch": shape.scratch}
        self.layer_plan = LayerPlan.allocate(shape.tokens, shape.top_k, shape.experts, "cpu", **slices)
        self._large = LargeBatchWork.allocate(shape, self._steps, "cpu")
        self.lists = self._large, self._large.with_own_spans()  # for even and odd layers
        self.ids = self._large.ids
        self._due: dict[int, float] = {}  # when each group has crossed the emulated link

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None, global_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        plan, owner, self._large = self.layer_plan, self._owner, self.lists[layer % 2]
        on_input = self.shape.weights_on_input
        told = {"marks": marks, "weights_on_input": on_input, "global_ids": global_ids}
        owner.decide(self._table, layer, ids, weights, rows, plan, large=True, **told)
        self._groups = plan_large_batch(
            self._table, layer, ids, plan, self.shape, half, ahead, self._steps, self._large
        )
        self._slots = slot_ranges(self._table)
        self._step, self._out = owner.begin(weighted_inputs(x, weights) if on_input else x, plan, self._activation)

    def copy(self, group: int) -> None:
        spans = self._large.spans[self.shape.spans(group)]
        self._owner.copy_spans(spans)
        # The next layer finds what is copied ahead.
        found = not self.shape.streamed_groups or group == self.shape.groups
        self._due[RESIDENT if found else group] = self._owner.arrival(int(spans[:, 2].sum()), time.perf_counter())

    def compute(self, group: int) -> None:
        items, owner, read = (self._groups == group).nonzero()[0].tolist(), self._owner, 0
        for item in items:
            read += owner.place(self._step, self.layer_plan, item, self._slots, through=False)
        sleep_until(max(self._due.pop(group, 0.0), owner.arrival(read, time.perf_counter())))
        owner.kernel.compute(items)

    def finish(self) -> Tensor:
        return combine(self._out, self._large.weights, self.ids)


def slot_ranges(table: Table) -> list[range]:
    """Return the addresses of the slots of each precision."""
    columns = table.pool, table.slot_bytes, *(table.staging[..., number] for number in range(2)), table.first_slot
    found = dict[tuple[int, ...], range]()
    for pool, nbytes, first, count, own in zip(*(column.flatten().tolist() for column in columns), strict=True):
        # The slots of a kind of layers begin with the first layer's and end with those for staging.
        key = pool, nbytes
        begin = min(own, found[key].start) if key in found else own
        found[key] = range(begin, first + count)
    return [range(pool + nbytes * slots.start, pool + nbytes * slots.stop) for (pool, nbytes), slots in found.items()]


def memory_at(address: int, nbytes: int) -> Tensor:
    """Return a uint8 [nbytes] view of this process's memory.

    The memory must outlive the view.
    """
    if nbytes == 0:  # experts without a gate
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
