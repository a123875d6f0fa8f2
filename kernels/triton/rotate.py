"""The input rotation of lattice codes.

It is signs, and a Hadamard transform in blocks of adjacent columns.

Inputs of gate and up are rotated in one launch, because each of their programs needs all columns. Inputs of down are
rotated by the programs that compute them, which hold whole blocks. The plain twin of both is ``kernels/lattice.py``,
bit for bit before rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels.triton.start import Start, run_kernel

_LEAST_COLUMNS = 1024  # fewest columns of a program: eight for each thread of four warps, one load of 16 bytes


def rotate_inputs(x: Tensor, into: Tensor, block: int, *, start: Start = run_kernel) -> None:
    """Rotate inputs in one launch, in float32, and round them once.

    Args:
        x: [tokens, columns].
        into: shape and dtype of x, overwritten.
        block: columns that are rotated together, a power of two that divides the number of columns.
        start: makes the launch.

    Raises:
        TypeError: into has another dtype.
        ValueError: into has another shape, or the block does not divide the columns or is not a power of two.
    """
    check_tensor("into", into, shape=tuple(x.shape), dtype=x.dtype)
    tokens, columns = x.shape
    if columns % block or block & (block - 1):
        raise ValueError(f"block is {block}, expected a power of two that divides the {columns} columns")
    width = max(block, min(triton.next_power_of_2(columns), _LEAST_COLUMNS))
    if tokens:
        warps = min(max(width // 512, 1), 16)
        sizes = {"COLUMNS": columns, "BLOCK": block, "WIDTH": width}
        start(rotate_kernel, (tokens, -(-columns // width)), (x, into), sizes, {"num_warps": warps})


def rotated_inputs(x: Tensor, block: int, *, start: Start = run_kernel) -> Tensor:
    """Return x, rotated into a new tensor if there is a block size."""
    if not block:
        return x
    rotate_inputs(x, into := torch.empty_like(x), block, start=start)
    return into


@triton.jit
def rotate_kernel(x, into, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """into = x rotated; grid [tokens, parts of WIDTH columns, each of whole blocks]."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * COLUMNS + column
    values = tl.load(x + at, mask=column < COLUMNS, other=0.0).to(tl.float32)
    rotated = rotate(values[None, :], tl.program_id(1) * WIDTH, BLOCK)
    tl.store(into + at[None, :], rotated.to(into.dtype.element_ty), mask=(column < COLUMNS)[None, :])


@triton.jit
def rotate(values, first, BLOCK: tl.constexpr):
    """Rotate float32 values [rows, columns] in blocks of BLOCK columns.

    Args:
        first: number of the first column.
    """
    number = (first + tl.arange(0, values.shape[1])).to(tl.uint32) * 0x9E3779B1
    number = (number ^ (number >> 15)) * 0x85EBCA77
    values = tl.where((((number ^ (number >> 13)) & 1) == 0)[None, :], values, -values)
    for power in tl.static_range(0, 30):
        if (2 << power) <= BLOCK:
            values = _pairs(values, 1 << power)
    return values * (BLOCK**-0.5)


@triton.jit
def _pairs(values, HALF: tl.constexpr):
    """Replace values that are HALF columns apart by their sum and difference."""
    pairs = values.reshape(values.shape[0], values.shape[1] // (2 * HALF), 2, HALF)
    second = tl.arange(0, 2)[None, None, :, None] == 1
    sums = tl.sum(pairs, 2, keep_dims=True)
    differences = tl.sum(tl.where(second, -pairs, pairs), 2, keep_dims=True)
    return tl.where(second, differences, sums).reshape(values.shape)
