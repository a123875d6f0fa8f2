"""E8 lattice codes: eight weights of a column are one point of E8.

Inputs are rotated before the product.

The eight 2-bit codes stand for -1.5, -0.5, 0.5 and 1.5. The parity of their low bits decides whether all eight are a
quarter higher (even) or lower (odd): these are the 65536 points of a shifted E8 inside a cube. Decoding costs hardly
more than a uniform grid. The ball that "QuIP#" (Tseng et al., 2024) cuts out of E8 has 5 to 10 % less error, but needs
a lookup table.

A weight is (point + point of the residual slice / 4) * scale, with one scale per row. Inputs are rotated so that the
weights look Gaussian: each column is multiplied by a sign, and blocks of columns are Hadamard transformed. The block
size is the largest power of two that divides the number of columns.
"""

import torch
from torch import Tensor

from vllm_dymoe.experts.matrix import BLOCK_ROWS

RESIDUAL = 0.25  # size of a point in the residual slice, relative to the base

# Rows of a block, point by point: the rows whose codes share a word.
POINT_ROWS = torch.tensor([[4 * w + b + half for half in (0, 32) for b in range(4)] for w in range(8)]).flatten()
WIDTH = 8


def points(codes: Tensor) -> Tensor:
    """Return the numbers of codes, float32 multiples of a quarter.

    Args:
        codes: uint8 [..., 8 n], eight for each point.
    """
    odd = (codes & 1).view(*codes.shape[:-1], -1, WIDTH).sum(-1) % 2
    return codes.float() - 1.25 - 0.5 * odd.repeat_interleave(WIDTH, -1)


def nearest(wanted: Tensor) -> Tensor:
    """Return codes of the nearest points, uint8 like wanted.

    This is the plain twin of ``kernels/cpu/nearest.h``.

    Args:
        wanted: float32 [..., 8 n].
    """
    wanted = wanted.unflatten(-1, (-1, WIDTH))
    best, found = wanted.new_full(wanted.shape[:-1], torch.inf), torch.zeros_like(wanted, dtype=torch.uint8)
    for odd in (0, 1):
        left = wanted + (1.75 if odd else 1.25)  # codes are their own numbers
        even_codes, odd_codes = (left > 1).float() * 2, (left > 2).float() * 2 + 1
        costs = (left - even_codes).square(), (left - odd_codes).square()
        is_odd = costs[1] < costs[0]
        # If the parity is wrong, the code whose exchange costs least is replaced.
        gap = (costs[0] - costs[1]).abs()
        least, which = gap.min(-1)
        wrong = is_odd.sum(-1) % 2 != odd
        is_odd = is_odd ^ (torch.zeros_like(is_odd).scatter(-1, which.unsqueeze(-1), True) & wrong.unsqueeze(-1))
        cost = torch.minimum(*costs).sum(-1) + torch.where(wrong, least, 0.0)
        better = cost < best
        codes = torch.where(is_odd, odd_codes, even_codes).to(torch.uint8)
        found, best = torch.where(better.unsqueeze(-1), codes, found), torch.where(better, cost, best)
    return found.flatten(-2)


def signs(columns: int) -> Tensor:
    """Return the columns' signs before the transform, float32 [columns].

    They are 1 and -1, by a hash of the column number.
    """
    number = torch.arange(columns, dtype=torch.int64)
    number = (number * 0x9E3779B1) & 0xFFFFFFFF
    number = ((number ^ (number >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return 1.0 - 2.0 * ((number ^ (number >> 13)) & 1)


def rotate(x: Tensor, block: int, *, back: bool = False) -> Tensor:
    """Return x with its last dimension rotated, or rotated back.

    The dtype, float32 or float64, stays.
    """
    flips = signs(x.shape[-1]).to(x.dtype)
    out = x if back else x * flips
    shape, half = out.shape, 1
    out = out.reshape(-1, block)
    while half < block:
        pairs = out.view(len(out), block // (2 * half), 2, half)
        out = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).flatten(1)
        half *= 2
    out = (out * block**-0.5).view(shape)
    return out * flips if back else out


def in_point_order(rows: Tensor) -> Tensor:
    """Return rows [whole blocks, ...] in the order in which points hold them."""
    return rows.unflatten(0, (-1, BLOCK_ROWS))[:, POINT_ROWS].flatten(0, 1)


def in_row_order(rows: Tensor) -> Tensor:
    """Undo ``in_point_order``."""
    return rows.unflatten(0, (-1, BLOCK_ROWS))[:, POINT_ROWS.argsort()].flatten(0, 1)


def numbers(codes: Tensor, *, nested: bool) -> Tensor:
    """Return the numbers of codes before scaling, float32, for rotated inputs.

    Args:
        codes: uint8 [padded_rows, columns].
    """
    columns = in_point_order(codes).t()
    base = points(columns >> 2) + RESIDUAL * points(columns & 3) if nested else points(columns)
    return in_row_order(base.t())
