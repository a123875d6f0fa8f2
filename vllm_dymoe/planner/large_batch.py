"""The planner of large-batch steps, with NumPy.

This is the plain twin of ``kernels/triton/large_batch.py``, bit for bit. Whether an expert is admitted is decided as in
any step (``small_batch``). In a large batch nearly every expert is active, so the link is the bottleneck. Misses are
streamed in *groups*, which use the two halves of the staging slots in turn: while one group is computed, the next is
copied. The number of groups follows from sizes alone, so the host can enqueue all launches before anything is known;
the device writes here which experts are in which group.

  group 0      resident: hits, and what was copied ahead while the layer before was computed
  group 1      admitted: what the layer keeps from now on
  group 2 + p  streamed, half of the staging slots at a time; the group after the last is the next layer's

Without streamed groups (in a CUDA graph, or with hardly any staging slots), admitted experts are copied before anything
is computed, and streamed experts are read from host memory by the kernel that computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import PROJECTIONS, Action, Cost, experts_width
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.rule import ABSENT, HIGH, LOW
from vllm_dymoe.planner.small_batch import bytes_ahead, found_ahead, list_positions, slot_address
from vllm_dymoe.planner.table import Counter, Table

RESIDENT, ADMITTED, STREAMED = 0, 1, 2  # the first two groups, and the first streamed one
_LEAST_CHUNK, _MOST_CHUNKS = 256, 64
_FEW = 8  # tokens of an expert
MOST_PARTS = 2  # most small steps that replace a large one; the CPU queue has memory for two steps per part
_MEMORY = 8  # cost of a resident expert: the link's time / 8 (memory bandwidth alone would be / 30)


@dataclass(frozen=True)
class LargeBatchShape:
    """The sizes of a large-batch step, which the host knows before it runs."""

    tokens: int  # rows, padding included
    top_k: int  # experts of a row
    experts: int  # of a layer
    slices: int = 1  # 2 if low versions are nested
    half: int = 0  # staging slots of a streamed group
    streamed_groups: int = 0  # with 0 everything is one group
    marked: bool = False  # whether tokens of prompts are marked
    decoded: int = 2  # positions of an expert of few tokens that are computed together
    weights_on_input: bool = False  # see ``plan_small_batch``

    @property
    def positions(self) -> int:
        """Number of (token, expert) pairs."""
        return self.tokens * self.top_k

    @property
    def crowded(self) -> bool:
        """Whether active experts have more than eight tokens on average."""
        return self.positions > _FEW * self.experts

    @property
    def items(self) -> int:
        """Most experts that can be active."""
        return min(self.experts, self.positions)

    @property
    def groups(self) -> int:
        """Number of groups that are computed."""
        return STREAMED + self.streamed_groups if self.streamed_groups else 1

    @property
    def chunk(self) -> int:
        """Pairs that one GPU program counts, a power of two."""
        most = -(-self.positions // _MOST_CHUNKS)
        return max(_LEAST_CHUNK, 1 << max(0, most - 1).bit_length())

    @property
    def chunks(self) -> int:
        """Number of GPU programs that count pairs."""
        return -(-self.positions // self.chunk)

    @property
    def scratch(self) -> int:
        """Scratch elements of a plan.

        With marks, pairs of prompts and of heavy hitters are counted as well.
        """
        return 3 * experts_width(self.experts) + (3 if self.marked else 1) * self.counted

    @property
    def counted(self) -> int:
        """Scratch elements of one count.

        One count takes sizes and sums (int64) of each chunk, and the pairs' numbers.
        """
        return 3 * self.chunks * experts_width(self.experts) + self.positions + self.positions % 2

    def spans(self, group: int) -> slice:
        """Return where a group's copies are in ``LargeBatchWork.spans``."""
        first = 0 if group == ADMITTED else self.items + (group - STREAMED) * self.half
        return slice(self.slices * first, self.slices * (first + (self.items if group == ADMITTED else self.half)))

    def work_items(self, group: int, steps: Sequence[int]) -> list[int]:
        """Return the most work items that a group can have in each class.

        Classes are by positions of an expert.
        """
        room = self.items if group < STREAMED else min(self.half, self.items)
        first = min(room * -(-steps[0] // self.decoded), room + self.positions // self.decoded)
        most = [first, *[room] * (len(steps) - 2), room + self.positions // steps[-1]]
        return [min(count, self.positions) for count in most]


@dataclass(frozen=True, eq=False)
class LargeBatchWork:
    """What a large-batch step adds to a LayerPlan."""

    spans: Tensor  # int64 [copies, 3]: source address, destination address, bytes; 0 bytes for no copy
    ids: Tensor  # int32 [tokens, top_k], the expert of each pair that is computed, -1 for the others
    weights: Tensor  # float32 [tokens, top_k], as :attr:`~.plan.LayerPlan.weights`
    work: Tensor
    """int32 [groups, classes, any, 3]: an item, its first position and its last + 1. Unused entries are
    (`items`, 0, 0), without positions."""

    @classmethod
    def allocate(cls, shape: LargeBatchShape, steps: Sequence[int], device: torch.device | str) -> Self:
        """Allocate for a step of a shape; ``steps`` has the most positions of each class."""
        work = shape.groups, len(steps), max(shape.work_items(RESIDENT, steps)), 3
        return cls(
            torch.zeros(shape.spans(STREAMED + shape.streamed_groups).stop, 3, dtype=torch.int64, device=device),
            torch.zeros(shape.tokens, shape.top_k, dtype=torch.int32, device=device),
            torch.zeros(shape.tokens, shape.top_k, dtype=torch.float32, device=device),
            torch.zeros(work, dtype=torch.int32, device=device),
        )

    def with_own_spans(self) -> Self:
        """Return the same work with its own list of copies, for the other parity.

        A layer's last copies bring experts of the next layer: the copy stream may still read their list while the next
        layer, whose parity is the other one, writes its own.
        """
        return replace(self, spans=torch.zeros_like(self.spans))


def crowded_tokens(top_k: int, experts: int) -> int:
    """Return the fewest tokens of a step for which it is crowded.

    See :attr:`LargeBatchShape.crowded`.
    """
    return _FEW * experts // top_k + 1


def small_batch_parts(
    tokens: int, most: int, top_k: int, experts: int, missing: float, costs: NDArray[np.int64]
) -> int:
    """Return into how many small-batch steps to split a large one; 0 to keep it whole.

    Small steps share their misses between link and CPU; a large one fetches all of them. The estimate compares their
    times.

    Args:
        tokens: tokens of the step.
        most: most tokens of a small-batch step.
        top_k: experts of a token.
        experts: experts of the layer.
        missing: share of the experts that are not resident.
        costs: :attr:`Table.cpu_costs`, if every expert is wanted HIGH.
    """
    parts, (link, first, more, _) = -(-tokens // most), costs[HIGH].tolist()
    if not first or not 1 < parts <= MOST_PARTS:
        return 0
    whole, part = (experts * (1 - (1 - top_k / max(experts, top_k)) ** rows) for rows in (tokens, most))
    host = first + more * (most * top_k / part - 1)
    shared = missing * part / (1 / link + 1 / host) + part * link / _MEMORY + int(costs[ABSENT, Cost.LINK])
    return parts if parts * shared < whole * link * (missing + 1 / _MEMORY) else 0


def plan_large_batch(
    table: Table, layer: int, ids: Tensor, plan: LayerPlan, shape: LargeBatchShape, half: int, ahead: int,
    steps: Sequence[int], large: LargeBatchWork,
) -> NDArray[np.int64]:  # fmt: skip
    """Write groups, copies and work lists of a planned step.

    Returns the group of each item, int64. Experts with few positions come first, so that the decode kernels need little
    scratch. Experts that the next layer does not hold are copied ahead into half of the staging slots, before that
    layer is routed.

    Args:
        table: on a CPU, like all other arguments. Experts copied ahead for this layer are forgotten; ``staged`` and
            ``staged_for`` of the next layer are rewritten.
        ids: int [tokens, top_k], for which the step was planned.
        plan: of the step; addresses, rows, pairs and positions of `work` are rewritten.
        half: 0 or 1, the half of the staging slots that the first streamed group uses.
        ahead: LOW or HIGH, the version in which the next layer's experts are served; 0 to copy nothing ahead.
        steps: most positions of an expert for the decode kernels, and of an item in each class of grouped kernels.
        large: overwritten.
    """
    host = table.on_host()
    large.spans.zero_()
    group = _list_groups(host, layer, plan, shape, half, large)
    host.staged_for[layer % 2] = -1
    if ahead:
        most = shape.half if len(group) else 0
        _copy_ahead(host, layer + 1, shape, (half + shape.streamed_groups) % 2, ahead, most, large)
    _list_work(plan, group, ids, shape, steps, large)
    return group


def _list_groups(
    host: Table, layer: int, plan: LayerPlan, shape: LargeBatchShape, half: int, large: LargeBatchWork
) -> NDArray[np.int64]:
    count = int(plan.count)
    group, kept, streamed = np.full(count, RESIDENT), 0, 0
    experts, precisions = plan.experts[:count].tolist(), plan.precisions[:count].tolist()
    for item, (expert, code) in enumerate(zip(experts, precisions, strict=True)):
        parts = (LOW, HIGH)[:code] if host.nested else (code,)
        actions = plan.action[: len(parts), item].tolist()
        slot, projections = found_ahead(host, layer, expert, code)
        found = slot if projections == PROJECTIONS else None
        streams = Action.STREAM in actions and found is None and streamed < shape.streamed_groups * shape.half
        if streams:
            group[item], listed = STREAMED + streamed // shape.half, shape.items + streamed
            place = streamed % shape.half + (half + streamed // shape.half) % 2 * shape.half
            streamed += 1
        elif Action.ADMIT in actions:
            group[item], listed = ADMITTED if shape.streamed_groups else RESIDENT, kept
            kept += 1
        for number, (part, action) in enumerate(zip(parts, actions, strict=True)):
            if action == Action.HIT or (action == Action.STREAM and not streams):
                continue
            slot = (
                int(host.staging[layer, part, 0]) + place if action == Action.STREAM else int(plan.slots[number, item])
            )
            source = int(host.source[layer, expert, part]) if found is None else slot_address(host, layer, part, found)
            large.spans[shape.slices * listed + number] = _span(host, layer, part, source, slot)
            plan.addresses[number, item] = torch.from_numpy(host.offsets[layer, part]) + slot_address(
                host, layer, part, slot
            )
    return group


def _span(host: Table, layer: int, code: int, source: int, slot: int) -> Tensor:
    return torch.tensor((source, slot_address(host, layer, code, slot), int(host.slot_bytes[layer, code])))


def _copy_ahead(
    host: Table, layer: int, shape: LargeBatchShape, half: int, code: int, most: int, large: LargeBatchWork
) -> None:
    staged, listed = host.staged[layer % 2, 0], shape.spans(shape.groups).start
    staged.fill(0)
    host.staged_for[layer % 2] = layer
    missing = (host.precision[layer] == ABSENT).nonzero()[0][:most].tolist()
    for rank, expert in enumerate(missing):
        slot = int(host.staging[layer, code, 0]) + half * shape.half + rank
        staged[:, expert] = slot, code, PROJECTIONS
        large.spans[listed + rank] = _span(host, layer, code, int(host.source[layer, expert, code]), slot)
    nbytes = len(missing) * bytes_ahead(host, layer, code, PROJECTIONS)
    host.counters[layer, [Counter.AHEAD, Counter.AHEAD_BYTES]] += len(missing), nbytes


def _list_work(
    plan: LayerPlan,
    group: NDArray[np.int64],
    ids: Tensor,
    shape: LargeBatchShape,
    steps: Sequence[int],
    large: LargeBatchWork,
) -> None:
    count = len(group)
    sizes = (plan.work[:count, 2] - plan.work[:count, 1]).numpy().astype(np.int64)
    classes = np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)
    begins, order = np.zeros(count, np.int64), np.argsort(classes != 0, kind="stable")
    begins[order] = sizes[order].cumsum() - sizes[order]
    plan.work[:count, 1:] = torch.from_numpy(np.stack((begins, begins + sizes), 1))
    large.work[:] = torch.tensor((shape.items, 0, 0))
    for number, step in enumerate((shape.decoded, *steps[1:])):
        for of_group in range(shape.groups):
            items = ((group == of_group) & (classes == number)).nonzero()[0]
            pieces = [(item, at, min(at + step, begins[item] + sizes[item]))
                      for item in items for at in range(begins[item], begins[item] + sizes[item], step)]  # fmt: skip
            large.work[of_group, number, : len(pieces)] = torch.tensor(pieces, dtype=torch.int32).view(-1, 3)
    large.ids.copy_(torch.where(plan.computed > 0, ids, -1))
    large.weights.copy_(plan.weights)
    begin_of = np.full(shape.experts + 1, -1)  # the last element is for id -1
    begin_of[plan.experts[:count].numpy()] = begins
    list_positions(begin_of[large.ids.flatten().numpy()], 1 if shape.weights_on_input else shape.top_k, plan)
