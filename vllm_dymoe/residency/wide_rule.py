"""What a wide step does about experts that are not there, with NumPy: the plain twin of ``kernels/triton/wide.py``.

Whether an expert is kept is decided as in any step (``decode_rule``). In a wide step nearly every expert is active, so
that the link is the bound, and experts come in *groups*, in turn through two halves of the staging slots: while one is
computed, the next is copied. Which groups there are follows from sizes alone, so that all of it can be enqueued before
anything is known; which experts are in them is written here, by the device.

    group 0      what is there: residents, and what was copied ahead while the layer before was computed
    group 1      what the layer keeps from now on
    group 2 + p  what passes, a half of the staging slots at a time

Where there are no such groups, in a graph or with hardly any staging slots, what is kept is copied before anything is
computed, and what passes is read from host memory by the kernel that computes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.residency.constants import Fate, experts_width
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.decode_rule import PROJECTIONS, bytes_ahead, slot_address
from vllm_dymoe.residency.rule import HIGH, LOW, NOWHERE
from vllm_dymoe.residency.table import Counter, Table

THERE, KEPT, PASSING = 0, 1, 2
"""The first two groups, and the first of those that pass."""
_LEAST_CHUNK, _MOST_CHUNKS = 256, 64


@dataclass(frozen=True)
class WideShape:
    """What the host knows of a layer's wide step.

    Attributes:
        tokens: rows, padding included.
        top_k: experts of a row.
        experts: of a layer.
        slices: 2 where low versions lie inside high ones.
        half: staging slots of a group.
        passes: groups that pass; 0 for none, and then everything is one group.
        marked: whether tokens of prompts are marked.
    """

    tokens: int
    top_k: int
    experts: int
    slices: int = 1
    half: int = 0
    passes: int = 0
    marked: bool = False

    @property
    def positions(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.top_k

    @property
    def items(self) -> int:
        """Experts that may be active."""
        return min(self.experts, self.positions)

    @property
    def groups(self) -> int:
        """Groups that are computed."""
        return PASSING + self.passes if self.passes else 1

    @property
    def chunk(self) -> int:
        """Pairs that a program counts; a power of two."""
        most = -(-self.positions // _MOST_CHUNKS)
        return max(_LEAST_CHUNK, 1 << max(0, most - 1).bit_length())

    @property
    def chunks(self) -> int:
        """Programs that count."""
        return -(-self.positions // self.chunk)

    @property
    def counted(self) -> int:
        """Elements of what is counted at a time: sizes and sums (int64) of each chunk, and pairs' numbers."""
        return 3 * self.chunks * experts_width(self.experts) + self.positions + self.positions % 2

    @property
    def scratch(self) -> int:
        """Elements of a decision's scratch: all pairs are counted, those of prompts, and those of heavy hitters."""
        return 3 * experts_width(self.experts) + (3 if self.marked else 1) * self.counted

    def room(self, group: int) -> int:
        """Experts that a group may hold."""
        return self.items if group < PASSING else min(self.half, self.items)

    def spans(self, group: int) -> slice:
        """Where a group's copies are listed."""
        first = 0 if group == KEPT else self.slices * (self.items + (group - PASSING) * self.half)
        return slice(first, first + self.slices * (self.items if group == KEPT else self.half))

    @property
    def listed(self) -> int:
        """Copies that are listed in all."""
        return self.slices * (self.items + self.passes * self.half)

    def work_items(self, group: int, steps: Sequence[int]) -> list[int]:
        """Most items of a group in each class, see :func:`class_of`."""
        room = self.room(group)
        most = [room * (-(-steps[0] // 2)), *[room] * (len(steps) - 2), room + self.positions // steps[-1]]
        return [min(count, self.positions) for count in most]


@dataclass(frozen=True, eq=False)
class WideWork:
    """What a wide step adds to a Decision.

    Attributes:
        group: int32 [items], of each item; -1 behind the last one.
        spans: int64 [listed, 3], where bytes lie, where they go, and how many they are: 0 for none.
        ids: int32 [tokens, top_k], experts of pairs that are computed, -1 for the others.
        work: int32 [any, 3], for each group and class the row of an expert and its positions, first and last + 1;
            what is left of a class is (`items`, 0, 0), a row of no bits.
    """

    group: Tensor
    spans: Tensor
    ids: Tensor
    work: Tensor

    @classmethod
    def allocate(cls, shape: WideShape, steps: Sequence[int], device: torch.device | str) -> Self:
        """For a step of a shape, with classes of so many positions."""
        items = sum(sum(shape.work_items(group, steps)) for group in range(shape.groups))
        return cls(
            torch.zeros(shape.items, dtype=torch.int32, device=device),
            torch.zeros(shape.listed, 3, dtype=torch.int64, device=device),
            torch.zeros(shape.tokens, shape.top_k, dtype=torch.int32, device=device),
            torch.zeros(items, 3, dtype=torch.int32, device=device),
        )


def class_of(sizes: NDArray[np.int64], steps: Sequence[int]) -> NDArray[np.int64]:
    """How experts of so many positions are computed.

    Args:
        sizes: int64 [any].
        steps: most positions of an expert that is decoded, and of one item of each grouped class.
    """
    return np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)


def plan_wide_plain(
    table: Table, layer: int, ids: Tensor, decision: Decision, shape: WideShape, half: int, steps: Sequence[int],
    wide: WideWork,
) -> None:  # fmt: skip
    """List groups, copies and work of a step that is decided, and say where what is copied will lie.

    Experts that are decoded have the first positions, so that what they share of scratch is little.

    Args:
        table: on a CPU, like everything else; of the layer nothing is ahead any more.
        layer: position among the MoE layers.
        ids: int [tokens, top_k], as the step was decided on.
        decision: of the step; addresses, rows, pairs and positions of `work` are rewritten.
        shape: of the step.
        half: 0 or 1, which half of the staging slots the first group that passes takes.
        steps: see :func:`class_of`.
        wide: overwritten.
    """
    host, count = table.on_host(), int(decision.count)
    sizes = (decision.work[:count, 2] - decision.work[:count, 1]).numpy().astype(np.int64)
    classes, group = class_of(sizes, steps), np.full(shape.items, -1)
    ranks = {KEPT: 0, PASSING: 0}
    wide.spans.zero_()
    for item in range(count):
        expert, code = int(decision.experts[item]), int(decision.tiers[item])
        parts = (LOW, HIGH)[:code] if host.nested else (code,)
        fates = [int(decision.fate[number, item]) for number in range(len(parts))]
        ahead = _ahead_slot(host, layer, expert, code)
        passes = Fate.PASS in fates and ahead is None and ranks[PASSING] < shape.passes * shape.half
        group[item] = THERE
        if passes:
            rank = ranks[PASSING]
            group[item] = PASSING + rank // shape.half
            ranks[PASSING] += 1
        elif Fate.KEEP in fates:
            rank = ranks[KEPT]
            group[item] = KEPT if shape.passes else THERE
            ranks[KEPT] += 1
        for number, (part, fate) in enumerate(zip(parts, fates, strict=True)):
            slot = int(decision.slots[number, item])
            if fate == Fate.PASS and passes:
                of_group = (half + rank // shape.half) % 2
                slot = int(host.staging[part, 0]) + of_group * shape.half + rank % shape.half
            elif fate != Fate.KEEP:
                continue
            source = int(host.source[layer, expert, part])
            if ahead is not None:
                source = slot_address(host, part, ahead)
            begin = shape.slices * (rank + (shape.items if passes else 0)) + number
            to = slot_address(host, part, slot)
            wide.spans[begin] = torch.tensor((source, to, int(host.slot_bytes[part])))
            decision.addresses[number, item] = torch.from_numpy(host.offsets[part]) + to
    host.staged_for[layer % 2] = -1
    wide.group.copy_(torch.from_numpy(group))
    begins = np.zeros(count, np.int64)
    order = np.argsort(classes != 0, kind="stable")
    begins[order] = sizes[order].cumsum() - sizes[order]
    _list_work(decision, shape, steps, classes, begins, sizes, wide)
    _list_pairs(ids, decision, begins, wide)


def _ahead_slot(table: Table, layer: int, expert: int, code: int) -> int | None:
    """Where all of a missing expert lies that was copied ahead."""
    slot, tier, projections = table.staged[layer % 2, :, expert].tolist()
    whole = not table.nested and table.staged_for[layer % 2] == layer and projections == PROJECTIONS
    return int(slot) if whole and tier == code else None


def _list_work(
    decision: Decision, shape: WideShape, steps: Sequence[int], classes: NDArray[np.int64], begins: NDArray[np.int64],
    sizes: NDArray[np.int64], wide: WideWork,
) -> None:  # fmt: skip
    first = 0
    for group in range(shape.groups):
        for number, room in enumerate(shape.work_items(group, steps)):
            step, listed = (2 if number == 0 else steps[number]), []
            those = (wide.group.numpy()[: len(sizes)] == group) & (classes == number)
            for item in those.nonzero()[0].tolist():
                stop = int(begins[item] + sizes[item])
                listed += [(item, at, min(at + step, stop)) for at in range(int(begins[item]), stop, step)]
            listed += [(shape.items, 0, 0)] * (room - len(listed))
            wide.work[first : first + room] = torch.tensor(listed, dtype=torch.int32).view(-1, 3)
            first += room
    decision.work[: len(sizes), 1] = torch.from_numpy(begins)
    decision.work[: len(sizes), 2] = torch.from_numpy(begins + sizes)


def _list_pairs(ids: Tensor, decision: Decision, begins: NDArray[np.int64], wide: WideWork) -> None:
    top_k, count = ids.shape[1], len(begins)
    chosen = torch.where(decision.computed > 0, ids.int(), -1)
    wide.ids.copy_(chosen)
    decision.rows.zero_()
    decision.pairs.zero_()
    flat = chosen.flatten().numpy()
    for expert, begin in zip(decision.experts[:count].tolist(), begins.tolist(), strict=True):
        pairs = torch.from_numpy((flat == expert).nonzero()[0]).int()
        decision.pairs[begin : begin + len(pairs)] = pairs
        decision.rows[begin : begin + len(pairs)] = pairs // top_k


def name_wide_plain(
    table: Table, layer: int, rows: Tensor, shape: WideShape, half: int, code: int, spans: Tensor
) -> None:
    """Choose what is copied for a layer before it is routed: of what it does not keep as much as half the slots hold.

    Args:
        table: on a CPU, like everything else; ``staged`` and ``staged_for`` of the layer's half are rewritten.
        layer: that comes next.
        rows: int32 [1], how many tokens are real; of none nothing is copied.
        shape: of the step.
        half: 0 or 1, which half of the staging slots.
        code: the version that all experts are served at.
        spans: int64 [half, 3], overwritten.
    """
    host = table.on_host()
    spans.zero_()
    staged = host.staged[layer % 2]
    staged.fill(0)
    host.staged_for[layer % 2] = layer
    for rank, expert in enumerate((host.tier[layer] == NOWHERE).nonzero()[0][: shape.half * bool(int(rows))].tolist()):
        slot = int(host.staging[code, 0]) + half * shape.half + rank
        staged[:, expert] = slot, code, PROJECTIONS
        source = int(host.source[layer, expert, code])
        spans[rank] = torch.tensor((source, slot_address(host, code, slot), int(host.slot_bytes[code])))
        host.counters[layer, [Counter.AHEAD, Counter.AHEAD_BYTES]] += 1, bytes_ahead(host, code, PROJECTIONS)
