"""A large-batch step of one MoE layer as launches without the host.

There are launches for lists, copies, and products of each row class.

How an expert is computed depends on the number of its tokens, as with a plan of the host (``plan.py``), so the bits
are the same. A class without work in a group is a launch of programs that end at once; a class of more tokens than the
step has is not launched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.combine import combine
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue
from vllm_dymoe.kernels.triton.large_batch import plan_large_batch_on_gpu
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
from vllm_dymoe.kernels.triton.start import PreparedLaunch
from vllm_dymoe.kernels.triton.tiles import Tiles
from vllm_dymoe.planner.large_batch import ADMITTED, STREAMED, LargeBatchShape, LargeBatchWork
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
        self._table, self._tiles, self._activation = table, tiles, activation
        self._disk_queue = disk_queue
        device, self._inner = table(0)["precision"].device, experts.intermediate
        self._steps = tiles.decode_tokens, *(tile.block_m for tile in tiles.grouped_down)
        self.layer_plan = plan = LayerPlan.allocate(
            shape.tokens, shape.top_k, shape.experts, device, slices=shape.slices, scratch=shape.scratch
        )
        classes = max(2, 1 + sum(step < shape.tokens for step in self._steps[:-1]))
        self._large, self._plan = LargeBatchWork.allocate(shape, self._steps[:classes], device), plan.tensors
        self._lists = self._large, self._large.with_own_spans()  # for even and odd layers
        self.ids, self._parity = self._large.ids, 0
        groups = range(ADMITTED, STREAMED + shape.streamed_groups + (shape.streamed_groups > 0))
        self._copies = [
            {group: _prepared_copies(lists.spans[shape.spans(group)]) for group in groups} for lists in self._lists
        ]
        residual = plan.addresses[-1] if experts.nested else None
        self._rotation = experts.rotation(precisions)
        self._experts = ExpertTable(experts, precisions, plan.addresses[0], plan.bits, residual=residual)
        self._at = plan.rows, plan.pairs
        # Experts that are decoded come first, and share scratch by their positions.
        self._decoded = min(shape.positions, shape.items * tiles.decode_tokens)
        self._scratch = scratch(*(self._decoded * each for each in tiles.shared(experts.hidden, experts.intermediate)))
        self._launches: list[list[tuple[PreparedLaunch, PreparedLaunch]]] = []  # of each group and class

    def plan(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Tensor, half: int, ahead: int,
        marks: Tensor | None,
    ) -> None:  # fmt: skip
        """Plan the step in four launches.

        Hidden states and unweighted outputs are allocated.
        """
        self._parity = layer % 2
        plan_large_batch_on_gpu(
            self._table(layer), layer, ids, weights, rows, self._plan, self.shape, half, ahead, self._steps,
            vars(self._lists[self._parity]), marks, self._disk_queue,
        )  # fmt: skip
        inputs = weighted_inputs(x, weights) if self.shape.weights_on_input else x
        self._x = rotated_inputs(inputs, self._rotation)
        self._hidden = x.new_empty(self.shape.positions, self._inner)
        self._out = x.new_empty(self.shape.positions, x.shape[1])
        if not self._launches:
            self._launches = [self._products(group) for group in range(self.shape.groups)]

    def copy(self, group: int) -> None:
        """Copy a group's experts in one launch."""
        self._copies[self._parity][group]()

    def compute(self, group: int) -> None:
        """Compute a group in two launches per class."""
        x, hidden, out = self._x, self._hidden, self._out
        for up, down in self._launches[group]:
            up(x, hidden)
            down(hidden, out)

    def _products(self, group: int) -> list[tuple[PreparedLaunch, PreparedLaunch]]:
        """Prepare the launches of a group.

        They are checked once: between layers only the first two tensors differ.
        """
        found: list[PreparedLaunch] = []

        def start(kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | int], *rest: Any) -> None:
            found.append(PreparedLaunch(kernel, grid, tensors[2:], *rest))

        tiles, table, lists = self._tiles, self._experts, self._large.work[group]
        rooms = self.shape.work_items(group, self._steps[: len(lists)])
        decoded, *grouped = (
            WorkList(work[:room], *(of[: of.numel() if number else self._decoded] for of in self._at))
            for number, (work, room) in enumerate(zip(lists, rooms, strict=True))
        )
        hidden = self._hidden[: decoded.positions]
        decode_gate_up(self._x, hidden, table, decoded, self._activation, tiles.gate_up, self._scratch, start=start)
        decode_down(hidden, self._out, table, decoded, tiles.down, self._scratch, start=start)
        for work, gate_up, down in zip(grouped, tiles.grouped_gate_up, tiles.grouped_down, strict=False):
            grouped_gate_up(self._x, self._hidden, table, work, self._activation, gate_up, start=start)
            grouped_down(self._hidden, self._out, table, work, down, start=start)
        return list(zip(found[::2], found[1::2], strict=True))

    def finish(self) -> Tensor:
        """Sum each token's experts in one launch."""
        return combine(self._out, self._large.weights, self.ids)


def _prepared_copies(spans: Tensor) -> PreparedLaunch:
    found: list[PreparedLaunch] = []
    copy_spans(spans, start=lambda *launch: found.append(PreparedLaunch(*launch)))
    return found[0]
