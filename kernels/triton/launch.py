"""The four entry points: checks that cost microseconds, then one launch each.

Every argument that changes from step to step is a device tensor; nothing here
waits for the device, so that a step can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.triton.activation import constants
from vllm_dymoe.kernels.triton.decode import down_kernel, gate_up_kernel
from vllm_dymoe.kernels.triton.grouped import grouped_gate_up_kernel, grouped_linear_kernel
from vllm_dymoe.kernels.triton.start import Start, run_kernel
from vllm_dymoe.kernels.triton.table import ExpertTable, WorkList
from vllm_dymoe.kernels.triton.tiles import DecodeTile, GroupedTile
from vllm_dymoe.residency.checks import check_tensor


@dataclass(frozen=True, eq=False)
class Scratch:
    """What decode needs beside its tensors when programs share a sum; one launch at a time may use it.

    Attributes:
        partials: float32, contents do not matter.
        semaphores: int32, zeros before and after every launch.
    """

    partials: Tensor
    semaphores: Tensor


@dataclass(frozen=True, eq=False)
class Weighting:
    """How decode_down sums a token's experts.

    Attributes:
        weights: float32 [tokens, top_k], of the router.
        computed: int32 [tokens, top_k], 1 for the pairs that are in the work list, 0 for the others.
    """

    weights: Tensor
    computed: Tensor


def decode_gate_up(
    x: Tensor,
    hidden: Tensor,
    table: ExpertTable,
    work: WorkList,
    activation: Activation,
    tile: DecodeTile,
    scratch: Scratch,
    *,
    start: Start = run_kernel,
) -> None:
    """hidden[position] = activation(gate x[row]) * up x[row], for few positions of each expert.

    Args:
        x: [tokens, hidden] in the experts' dtype.
        hidden: [positions, intermediate] like x, overwritten.
        table: the experts. With destinations, gate and up are stored there too, all bytes of their sections.
        work: an item has one or two positions; with destinations any number, because an expert is in one item only, so
            that its bytes are read once.
        activation: of the gate.
        tile: size of a program; its split decides the order of sums, with and without destinations.
        scratch: if the tile's split is above 1.
        start: launch, or only compile.

    Raises:
        TypeError, ValueError: see decode_gate_up.
    """
    shape = table.shape
    check_tensor("x", x, shape=(None, shape.hidden), dtype=shape.dtype)
    check_tensor("hidden", hidden, shape=(work.positions, shape.intermediate), dtype=shape.dtype)
    if not len(work.items):
        return
    blocks = _blocks(shape.intermediate)
    programs = tile.split
    if programs > 1:
        _check_scratch(scratch, work.positions * programs * 2 * 64 * blocks, work.positions * blocks)
    start(
        gate_up_kernel,
        (blocks, len(work.items), programs),
        (
            x,
            hidden,
            *_addresses(table),
            table.bits,
            work.items,
            work.rows,
            scratch.partials,
            scratch.semaphores,
        ),
        {
            "ROWS": shape.intermediate,
            "COLUMNS": shape.hidden,
            **_sections(table),
            "ACTIVATION": constants(activation),
            "SPLIT": tile.split,
            "FETCH": table.destinations is not None,
            "WARPS": tile.warps,
        },
        tile.options,
    )


def decode_down(
    hidden: Tensor,
    out: Tensor,
    table: ExpertTable,
    work: WorkList,
    tile: DecodeTile,
    scratch: Scratch,
    weighting: Weighting | None = None,
    *,
    start: Start = run_kernel,
) -> None:
    """Down projections of what decode_gate_up left, for all experts in one launch.

    Without a weighting out[pair] = down(hidden[position]). With one, out[token] is the weighted sum over the token's
    computed pairs, in ascending k, bit for bit what combine makes of unweighted outputs; tokens with no computed pair
    keep what they held, or become zero if the work's last item is (-1, 0, tokens).

    Args:
        hidden: [positions, intermediate] in the experts' dtype.
        out: [tokens * top_k, hidden] or, with a weighting, [tokens, hidden]; overwritten where named.
        table: the experts. With destinations, down is stored there too.
        work: as for decode_gate_up.
        tile: as for decode_gate_up.
        scratch: as for decode_gate_up, or with a weighting.
        weighting: of the router.
        start: launch, or only compile.

    Raises:
        TypeError, ValueError: see decode_gate_up.
    """
    shape = table.shape
    check_tensor("hidden", hidden, shape=(work.positions, shape.intermediate), dtype=shape.dtype)
    top_k = 1
    if weighting is None:
        check_tensor("out", out, shape=(None, shape.hidden), dtype=shape.dtype)
    else:
        check_tensor("weights", weighting.weights, shape=(None, None), dtype=torch.float32)
        tokens, top_k = weighting.weights.shape
        check_tensor("computed", weighting.computed, shape=(tokens, top_k), dtype=torch.int32)
        check_tensor("out", out, shape=(tokens, shape.hidden), dtype=shape.dtype)
    if not len(work.items):
        return
    blocks = _blocks(shape.hidden)
    programs = tile.split
    if weighting is not None:
        _check_scratch(scratch, weighting.weights.numel() * programs * 64 * blocks, out.shape[0] * blocks)
    elif programs > 1:
        _check_scratch(scratch, work.positions * programs * 64 * blocks, work.positions * blocks)
    start(
        down_kernel,
        (blocks, len(work.items), programs),
        (
            hidden,
            out,
            *_addresses(table),
            table.bits,
            work.items,
            work.pairs,
            scratch.partials if weighting is None else weighting.weights,
            scratch.semaphores if weighting is None else weighting.computed,
            scratch.partials,
            scratch.semaphores,
        ),
        {
            "ROWS": shape.hidden,
            "COLUMNS": shape.intermediate,
            **_sections(table),
            "TOP_K": top_k,
            "WEIGHTED": weighting is not None,
            "SPLIT": tile.split,
            "FETCH": table.destinations is not None,
            "WARPS": tile.warps,
        },
        tile.options,
    )


def grouped_gate_up(
    x: Tensor,
    hidden: Tensor,
    table: ExpertTable,
    work: WorkList,
    activation: Activation,
    tile: GroupedTile,
    *,
    start: Start = run_kernel,
) -> None:
    """The same as decode_gate_up on tensor cores, for many positions of each expert.

    Args:
        x: [tokens, hidden] in the experts' dtype.
        hidden: [positions, intermediate] like x, overwritten.
        table: the experts, without destinations.
        work: an item has at most tile.block_m positions.
        activation: of the gate.
        tile: size of a program.
        start: launch, or only compile.

    Raises:
        TypeError: a wrong dtype.
        ValueError: sizes that disagree, or destinations.
    """
    _check_no_destinations(table)
    shape = table.shape
    check_tensor("x", x, shape=(None, shape.hidden), dtype=shape.dtype)
    check_tensor("hidden", hidden, shape=(work.positions, shape.intermediate), dtype=shape.dtype)
    if not len(work.items):
        return
    start(
        grouped_gate_up_kernel,
        (len(work.items), -(-shape.intermediate // tile.block_n)),
        (
            x,
            hidden,
            table.addresses,
            table.addresses if table.fine is None else table.fine,
            table.bits,
            work.items,
            work.rows,
        ),
        {
            "ROWS": shape.intermediate,
            "COLUMNS": shape.hidden,
            **_sections(table),
            "ACTIVATION": constants(activation),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": min(tile.block_k, shape.group_size),
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


GATE, UP, DOWN = range(3)


def grouped_linear(
    x: Tensor,
    out: Tensor,
    table: ExpertTable,
    work: WorkList,
    projection: int,
    tile: GroupedTile,
    *,
    gather: bool = False,
    scatter: bool = False,
    start: Start = run_kernel,
) -> None:
    """One projection of many positions: out[pair or position] = projection(x[row or position]).

    Args:
        x: [any, columns of the projection] in the experts' dtype.
        out: [any, rows of the projection] like x, overwritten where named.
        table: the experts, without destinations; only this projection's sections have to be there.
        work: an item has at most tile.block_m positions.
        projection: GATE, UP or DOWN.
        tile: size of a program.
        gather: whether inputs are rows of x by work.rows, or x has one row for each position.
        scatter: whether results go to work.pairs, or to one row for each position.
        start: launch, or only compile.

    Raises:
        TypeError: a wrong dtype.
        ValueError: sizes that disagree, destinations, or another projection.
    """
    _check_no_destinations(table)
    shape = table.shape
    if projection not in (GATE, UP, DOWN):
        raise ValueError(f"projection is {projection}, expected 0 (gate), 1 (up) or 2 (down)")
    rows, columns = shape.intermediate, shape.hidden
    if projection == DOWN:
        rows, columns = columns, rows
    check_tensor("x", x, shape=(None if gather else work.positions, columns), dtype=shape.dtype)
    check_tensor("out", out, shape=(None if scatter else work.positions, rows), dtype=shape.dtype)
    if not len(work.items):
        return
    start(
        grouped_linear_kernel,
        (len(work.items), -(-rows // tile.block_n)),
        (
            x,
            out,
            table.addresses,
            table.addresses if table.fine is None else table.fine,
            table.bits,
            work.items,
            work.rows,
            work.pairs,
        ),
        {
            "PROJECTION": projection,
            "ROWS": rows,
            "COLUMNS": columns,
            **_sections(table),
            "GATHER": gather,
            "SCATTER": scatter,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": min(tile.block_k, shape.group_size),
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


def _addresses(table: ExpertTable) -> tuple[Tensor, ...]:
    """Where decode reads and stores; what the table has not stands for itself, and is not read."""
    parts = table.addresses, table.destinations, table.fine, table.fine_destinations
    return tuple(table.addresses if part is None else part for part in parts)


def _sections(table: ExpertTable) -> dict[str, int]:
    """What every kernel is told of the sections that it reads."""
    shape = table.shape
    return {
        "GROUP": shape.group_size,
        "TIERS": table.mask,
        "NESTED": shape.nested,
        "STEPS": sum(shape.integer_zeros),
        "ORDERED": sum(shape.act_order),
        "BIAS": shape.bias,
    }


def _blocks(rows: int) -> int:
    return -(-rows // 64)


def _check_no_destinations(table: ExpertTable) -> None:
    """Refuse to leave slots unfilled: many programs read a section here, and none of them stores it."""
    if table.destinations is not None:
        raise ValueError("table has destinations, but only the decode kernels fetch through")


def _check_scratch(scratch: Scratch, partials: int, semaphores: int) -> None:
    """Refuse scratch that is too small; both tensors are one-dimensional."""
    check_tensor("partials", scratch.partials, shape=(None,), dtype=torch.float32)
    check_tensor("semaphores", scratch.semaphores, shape=(None,), dtype=torch.int32)
    for name, tensor, needed in (
        ("partials", scratch.partials, partials),
        ("semaphores", scratch.semaphores, semaphores),
    ):
        if tensor.numel() < needed:
            raise ValueError(f"{name} has {tensor.numel()} elements, expected at least {needed}")
