"""One description of a layer's step: work for every expert that it will compute, on the device in one copy.

Where an expert lies is all that is not known at the beginning, and all that is added when it comes. Positions of a work
list are counted from the beginning of a *run*, which is as many experts of one class as the workspace holds; any
neighbours of a run can share a launch, and what one expert is computed by does not depend on which do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vllm_dymoe.kernels.triton.place import Place, place_experts
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.kernels.triton.table import ExpertShape, ExpertTable, WorkList, check_addresses
from vllm_dymoe.kernels.triton.tiles import Tiles
from vllm_dymoe.residency.format import Expert

DECODE = -1


@dataclass(frozen=True)
class Run:
    """Positions that share the workspace.

    Attributes:
        grouped: index of the grouped tiles, DECODE for decode.
        first: first of its positions in the layer.
        stop: last + 1.
    """

    grouped: int
    first: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """What is launched for experts of given numbers of tokens, in the order of their classes.

    Attributes:
        order: indices of the experts; rows of the table are in this order.
        runs: positions that share the workspace.
        items: [expert's row, first and last + 1 of its positions in their run].
        pieces: of each row, (run, first and last + 1 of its items); several for what no run holds at once.
    """

    order: list[int]
    runs: list[Run]
    items: list[list[int]]
    pieces: list[list[tuple[int, int, int]]]


def plan(counts: Sequence[int], tiles: Tiles, limits: tuple[int, int]) -> Plan:
    """Cut experts into items and runs.

    Args:
        counts: tokens of each expert, at least 1.
        tiles: of the shape.
        limits: positions that a run may have, in decode and grouped.
    """
    classes = [token_class(tiles, count) for count in counts]
    order = sorted(range(len(counts)), key=classes.__getitem__)
    made = Plan(order, [], [], [])
    position = 0
    for row, expert in enumerate(order):
        grouped, count = classes[expert], counts[expert]
        step = 2 if grouped == DECODE else tiles.grouped_linear[grouped].block_m
        limit = limits[grouped != DECODE]
        largest = limit if grouped == DECODE else max(limit // step, 1) * step
        made.pieces.append([])
        for begin in range(position, position + count, largest):
            stop = min(begin + largest, position + count)
            run = made.runs[-1] if made.runs else None
            if run is None or run.grouped != grouped or stop - run.first > limit:
                made.runs.append(Run(grouped, begin, stop))
            else:
                made.runs[-1] = Run(grouped, run.first, stop)
            first = made.runs[-1].first
            made.pieces[-1].append((len(made.runs) - 1, len(made.items), len(made.items) + -(-(stop - begin) // step)))
            made.items.extend([row, at - first, min(at + step, stop) - first] for at in range(begin, stop, step))
        position += count
    return made


def token_class(tiles: Tiles, tokens: int) -> int:
    """DECODE, or the index of the grouped tiles."""
    return DECODE if tokens <= tiles.decode_tokens else tiles.grouped_class(tokens)


class Description:
    """A layer's step on the device.

    Args:
        plan: what is launched.
        rows: int64 [positions] on the host, rows of x of each expert, in the plan's order.
        pairs: int64 [positions], rows of the output.
        placed: experts that have a place already, by row.
        device: where kernels run.
        nested: whether experts may have a second section for each projection.

    Attributes:
        addresses: int64 [experts, 3], by row; behind these, if nested, as many rows of second sections.
        bits: int32, like addresses.

    Raises:
        ValueError: a misaligned address.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Tensor,
        pairs: Tensor,
        placed: Sequence[tuple[int, Expert]],
        device: torch.device,
        *,
        nested: bool = False,
    ) -> None:
        self._plan, self._nested = plan, nested
        experts, items = len(plan.order) * (1 + nested), len(plan.items)
        addresses, bits = torch.zeros(experts, 3, dtype=torch.int64), torch.zeros(experts, 3, dtype=torch.int32)
        if placed:
            places = self._places(placed)
            chosen = torch.tensor([place.row for place in places])
            addresses[chosen] = torch.tensor([place.sections for place in places])
            bits[chosen] = torch.tensor([place.widths for place in places], dtype=torch.int32)
        small = torch.cat((bits.view(-1), torch.tensor(plan.items, dtype=torch.int32).view(-1)))
        odd = small.new_zeros(len(small) % 2)
        parts = [addresses.view(-1), torch.cat((small, odd)).view(torch.int64)]
        host = torch.cat([*parts, rows, pairs])
        if device.type == "cuda":
            host = host.pin_memory()
        moved = host.to(device, non_blocking=True)
        self.addresses = moved[: 3 * experts].view(-1, 3)
        small = moved[3 * experts : 3 * experts + (len(small) + 1) // 2].view(torch.int32)
        self.bits = small[: 3 * experts].view(-1, 3)
        self._items = small[3 * experts : 3 * (experts + items)].view(-1, 3)
        self._rows, self._pairs = moved[len(moved) - 2 * len(rows) :].view(2, -1)

    def place(self, placed: Sequence[tuple[int, Expert]], *, start: Start = run_kernel) -> None:
        """Say where some more experts are, by row.

        Raises:
            ValueError: a misaligned address.
        """
        place_experts(self.addresses, self.bits, self._places(placed), start=start)

    def table(self, shape: ExpertShape, tiers: frozenset[int]) -> ExpertTable:
        """All experts, as kernels want them."""
        if not self._nested:
            return ExpertTable(shape, tiers, self.addresses, self.bits)
        (addresses, fine), (bits, _) = self.addresses.chunk(2), self.bits.chunk(2)
        return ExpertTable(shape, tiers, addresses, bits, fine=fine)

    def _places(self, placed: Sequence[tuple[int, Expert]]) -> list[Place]:
        behind = len(self._plan.order)
        places = []
        for row, expert in placed:
            gate, up, down = expert
            widths = gate.format.code.tag, up.format.code.tag, down.format.code.tag
            places.append(Place(row, _checked(gate.addresses[0], up.addresses[0], down.addresses[0]), widths))
            if gate.fine is not None and self._nested:
                fine = _checked(gate.addresses[-1], up.addresses[-1], down.addresses[-1])
                places.append(Place(behind + row, fine, (0, 0, 0)))
        return places

    def launches(self, rows: Sequence[int]) -> Iterator[tuple[int, WorkList]]:
        """Grouped tiles and work list of each launch that some experts need.

        Args:
            rows: of the experts, ascending.
        """
        pieces = [piece for row in rows for piece in self._plan.pieces[row]]
        # Where a launch begins: at another run, or behind an expert that is not among them.
        cuts = [
            number
            for number, (before, after) in enumerate(pairwise(pieces), 1)
            if before[0] != after[0] or before[2] != after[1]
        ]
        for begin, end in pairwise([0, *cuts, len(pieces)]):
            run = self._plan.runs[pieces[begin][0]]
            part = slice(run.first, run.stop)
            items = self._items[pieces[begin][1] : pieces[end - 1][2]]
            yield run.grouped, WorkList(items, self._rows[part], self._pairs[part])


def _checked(gate: int, up: int, down: int) -> tuple[int, int, int]:
    check_addresses("work", (gate, up, down))
    return gate, up, down
