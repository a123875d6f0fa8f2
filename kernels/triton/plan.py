"""Chooses the launches of a layer's step from the number of each expert's tokens.

Positions of a work list are counted from the beginning of a *run*: as many experts of one class as the workspace holds.
Any adjacent experts of a run can share a launch, and the result of an expert does not depend on which ones do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dymoe.kernels.triton.tiles import Tiles

DECODE = -1


@dataclass(frozen=True)
class Run:
    """Positions that share the workspace: from first to stop in the layer."""

    grouped: int  # index of the grouped tiles, DECODE for decode
    first: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """The launches for experts with given numbers of tokens.

    They are in the order of their classes.
    """

    order: list[int]  # indices of the experts; rows of the table are in this order
    runs: list[Run]
    items: list[list[int]]  # expert's row, first and last + 1 of its positions in their run
    pieces: list[list[tuple[int, int, int]]]
    """For each row, (run, first and last + 1 of its items); several for an expert that no run holds at once."""


def plan(counts: Sequence[int], tiles: Tiles, limits: tuple[int, int]) -> Plan:
    """Divide experts into items and runs.

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
        step = tiles.gate_up.positions if grouped == DECODE else tiles.grouped_down[grouped].block_m
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
    """Return the class of an expert with ``tokens`` tokens.

    It is DECODE, or the index of the grouped tiles.
    """
    if tokens <= tiles.decode_tokens:
        return DECODE
    holding = (number for number, tile in enumerate(tiles.grouped_down) if tokens <= tile.block_m)
    return next(holding, len(tiles.grouped_down) - 1)
