"""A large-batch step of one MoE layer as launches without the host.

There are launches for lists, copies, and products. They are prepared at a layer's first step, and repeated with other
addresses afterwards.

How an expert is computed depends on the number of rows of the step and of its tokens, never on the other experts, so
residency changes no bit. If one kernel suits all experts (:meth:`Tiles.of_large_batch`), a group takes two launches.
Otherwise experts are divided into classes by their tokens: a class without work in a group is a launch of programs that
end at once, and a class that no expert of the step can belong to is not launched.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.combine import Pairs
from vllm_dymoe.kernels.triton.combine import combine_on_gpu
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.large_batch import counted_parts, plan_large_batch_on_gpu
from vllm_dymoe.kernels.triton.launch import (
    ExpertShape,
    ExpertTable,
    Scratch,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.rotate import rotated_inputs
from vllm_dymoe.kernels.triton.spans import copy_spans
from vllm_dymoe.kernels.triton.start import Given, Repeated, Start
from vllm_dymoe.kernels.triton.tiles import EVERY, Tiles
from vllm_dymoe.planner.large_batch import LargeBatchShape, LargeBatchWork
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.weights import weighted_inputs


class TritonLargeBatch:
    """See :class:`vllm_dymoe.executor.large_batch.LargeBatchStep`.

    Args:
        table: returns the tensors of a Table by name, as a layer's kernels take them.
        shape: of the step.
        experts: what all experts have in common.
        precisions: bit-widths, or codebooks' tags, of gate and up that may occur.
        tiles: sizes of programs.
        activation: applied between the projections.
        disk_queue: brings what is missing into memory; None if all of it is there.
        scratch: decode's partial sums and semaphores; one layer at a time uses it.
    """

    def __init__(
        self,
        table: Callable[[int], Mapping[str, Tensor]],
        shape: LargeBatchShape,
        experts: ExpertShape,
        precisions: frozenset[int],
        tiles: Tiles,
        activation: Activation,
        scratch: Callable[[int, int], Scratch],
        disk_queue: DeviceQueue | None = None,
    ) -> None:
        self.shape = shape = replace(shape, decoded=tiles.gate_up.positions)
        self._table, self._activation = table, activation
        self._tiles = tiles = tiles.of_large_batch(crowded=shape.crowded)
        self._disk_queue = disk_queue
        device, self._inner = table(0)["precision"].device, experts.intermediate
        # Lists have two classes at least, the second of which may have no experts.
        self._steps = tiles.decode_tokens, *([tile.block_m for tile in tiles.grouped_down] or [EVERY])
        self.layer_plan = plan = LayerPlan.allocate(
            shape.tokens, shape.top_k, shape.experts, device, slices=shape.slices, scratch=shape.scratch
        )
        classes = max(2, 1 + sum(step < shape.tokens for step in self._steps[:-1]))
        self._large = LargeBatchWork.allocate(shape, self._steps[:classes], device)
        self._lists = self._large, self._large.with_own_spans()  # for even and odd layers
        self.ids, self._parity = self._large.ids, 0
        residual = plan.addresses[-1] if experts.nested else None
        self._rotation = experts.rotation(precisions)
        self._experts = ExpertTable(experts, precisions, plan.addresses[0], plan.bits, residual=residual)
        self._at = plan.rows, plan.pairs
        # Experts that are decoded come first, and share scratch by their positions.
        self._decoded = min(shape.positions, shape.items * tiles.decode_tokens)
        self._scratch = scratch(*(self._decoded * each for each in tiles.shared(experts.hidden, experts.intermediate)))
        self._columns = cache(partial(_columns_of, table))  # without a reference to this object
        self._launches = Repeated()

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None, global_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan the step in four launches, or six; see ``plan_large_batch_on_gpu``.

        Hidden states and outputs are allocated.
        """
        shape, self._parity = self.shape, layer % 2
        inputs = weighted_inputs(x, weights) if shape.weights_on_input else x
        tensors = {
            "ids": ids,
            "weights": weights,
            "rows": rows,
            "x": rotated_inputs(inputs, self._rotation),
            "hidden": x.new_empty(shape.positions, self._inner),
            "out": x.new_empty(shape.positions, x.shape[1]),
            "combined": x.new_empty(shape.tokens, x.shape[1]),
        }
        if global_ids is not None:
            tensors["global_ids"] = global_ids
        if marks is not None:
            tensors["parts"] = counted_parts(ids if global_ids is None else global_ids, weights, marks)
        self._given = Given(tensors, {"layer": layer, "half": half, "ahead": ahead}, *self._columns(layer))
        self._launches.run(("plan", self._parity), self._given, self._plan)

    def copy(self, group: int) -> None:
        """Copy a group's experts in one launch."""
        self._launches.run(("copy", self._parity, group), self._given, self._copy, group)

    def compute(self, group: int) -> None:
        """Compute a group in two launches for each class of experts."""
        self._launches.run(group, self._given, self._compute, group)

    def finish(self) -> Tensor:
        """Sum each token's experts in one launch."""
        self._launches.run("finish", self._given, self._combine)
        combined = self._given.tensors["combined"]
        del self._given  # with hidden states and unweighted outputs
        return combined

    def _plan(self, start: Start) -> None:
        given, numbers, lists = self._given.tensors, self._given.numbers, vars(self._lists[self._parity])
        layer, routed = numbers["layer"], (given["ids"], given["weights"], given["rows"])
        plan_large_batch_on_gpu(
            self._table(layer), layer, *routed, self.layer_plan.tensors, self.shape, numbers["half"], numbers["ahead"],
            self._steps, lists, given.get("parts"), self._disk_queue, global_ids=given.get("global_ids"), start=start,
        )  # fmt: skip

    def _copy(self, group: int, start: Start) -> None:
        copy_spans(self._lists[self._parity].spans[self.shape.spans(group)], start=start)

    def _compute(self, group: int, start: Start) -> None:
        given, tiles, experts, shape = self._given.tensors, self._tiles, self._experts, self.shape
        steps, (x, hidden, out) = self._steps, (given["x"], given["hidden"], given["out"])
        lists = self._large.work[group]
        rooms = shape.work_items(group, steps[: len(lists)])
        if tiles.decode_tokens:
            work = WorkList(lists[0][: rooms[0]], *(of[: self._decoded] for of in self._at))
            inner = hidden[: self._decoded]
            decode_gate_up(x, inner, experts, work, self._activation, tiles.gate_up, self._scratch, start=start)
            decode_down(inner, out, experts, work, tiles.down, self._scratch, start=start)
        for number, (gate_up, down) in enumerate(zip(tiles.grouped_gate_up, tiles.grouped_down, strict=True), 1):
            if steps[number - 1] < min(shape.tokens, steps[number]):  # some expert can be of this class
                work = WorkList(lists[number][: rooms[number]], *self._at)
                grouped_gate_up(x, hidden, experts, work, self._activation, gate_up, start=start)
                grouped_down(hidden, out, experts, work, down, start=start)

    def _combine(self, start: Start) -> None:
        given = self._given.tensors
        combine_on_gpu(Pairs(given["out"], self._large.weights, self.ids, None, False), given["combined"], start=start)


def _columns_of(
    table: Callable[[int], Mapping[str, Tensor]], layer: int
) -> tuple[Mapping[str, Tensor], Mapping[str, int]]:
    """Return the tensors that are other ones for each layer, and their addresses."""
    shared, found = table(0), table(layer)  # what is a part of a tensor is a new view each time
    own = {name: column for name, column in found.items() if column is not shared[name]}
    return own, {name: column.data_ptr() for name, column in own.items()}
