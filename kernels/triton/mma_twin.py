"""The plain twin of ``mma_rows``.

It has the same sums in the same order, without words, lanes and layouts.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.experts.matrix import PackedMatrix
from vllm_dymoe.kernels.lattice import numbers
from vllm_dymoe.kernels.pack import stored_codes

_STEP = 16  # columns of one mma

Floats = NDArray[np.float32]


def mma_rows_plain(x: Tensor, packed: PackedMatrix, *, split: int, warps: int, strip: int) -> Tensor:
    """Return products of x with a packed matrix below 16 bits.

    They are added as `split` programs of each block of rows add them. Each mma is exact and then rounded to float32,
    which hardware is not quite.

    Args:
        x: [tokens, columns] bfloat16 or float16, rotated for lattice codes.
        packed: the matrix.
        split: programs that share the columns.
        warps: of a program.
        strip: columns that a warp owns at a time.

    Returns:
        float32 [tokens, rows], without the bias.
    """
    fmt, offset = packed.format, 1024.0 if x.dtype == torch.float16 else 128.0
    columns = x.float() if packed.order is None else x.float()[:, packed.order[: fmt.columns].long()]
    padded: Floats = torch.nn.functional.pad(columns, (0, fmt.padded_columns - fmt.columns)).numpy()
    scale, rest, values = _operands(packed, offset)
    strips = fmt.padded_columns // strip
    share = -(-strips // (split * warps)) * warps
    total = np.zeros((len(x), fmt.rows), np.float32)
    for part in range(split):
        of_warps = [np.zeros_like(total) for _ in range(warps)]
        for number in range(part * share, min((part + 1) * share, strips)):
            products, sums = np.zeros_like(total), np.zeros((len(x), 1), np.float32)
            for at in range(number * strip, (number + 1) * strip, _STEP):
                some = padded[:, at : at + _STEP].astype(np.float64)
                products = (products + some @ values[:, at : at + _STEP].T).astype(np.float32)
                sums = (sums + some.sum(1, keepdims=True)).astype(np.float32)
            group = number * strip // fmt.group_size if scale.shape[1] > 1 else 0
            warp, (s, r) = number % warps, (factor[:, group].astype(np.float64) for factor in (scale, rest))
            of_warps[warp] = (r * sums + of_warps[warp]).astype(np.float32)
            of_warps[warp] = (s * products + of_warps[warp]).astype(np.float32)
        while len(of_warps) > 1:  # halves of the warps are added, as a tree
            half = len(of_warps) // 2
            of_warps = [of_warps[warp] + of_warps[warp + half] for warp in range(half)]
        total += of_warps[0] * _of_matrix(packed)
    return torch.from_numpy(total)


def _operands(packed: PackedMatrix, offset: float) -> tuple[Floats, Floats, NDArray[np.float64]]:
    """Return scale, rest and operand A of a matrix.

    A weight is scale * operand + rest.

    Returns:
        scale and rest [rows, groups], and the operand [rows, columns].
    """
    fmt = packed.format
    codes = stored_codes(packed)[: fmt.rows]
    if packed.scales is not None:
        scale = packed.scales.float().transpose(1, 2).reshape(-1, fmt.groups)[: fmt.rows].numpy()
        return scale, np.zeros_like(scale), fmt.encoding.levels(codes).double().numpy()
    if fmt.encoding.lattice:
        nested = packed.residual is not None
        step, center = (0.125, -1.5625 - 0.625) if nested else (0.5, -1.25 - 0.5)
        exact = numbers(stored_codes(packed), nested=nested)[: fmt.rows].double().numpy()
        factor = np.full((fmt.rows, 1), step, np.float32)
        rest = np.full((fmt.rows, 1), center - step * offset, np.float32)
        return factor, rest, (exact - center) / step + offset
    assert packed.scales_zeros is not None
    scale, zero = packed.scales_zeros.float().permute(2, 1, 0)[:, : fmt.rows].numpy()
    if fmt.integer_zeros:
        zero = zero * scale
    if fmt.bits == 8:
        offset += 16 * offset
    step, center = fmt.encoding.step, fmt.encoding.center
    rest = (-(center + step * offset) * scale.astype(np.float64) + zero).astype(np.float32)
    return scale * np.float32(step), rest, codes.double().numpy() + offset


def _of_matrix(packed: PackedMatrix) -> Floats:
    """Return what all products with the rows are multiplied with.

    That is a lattice's scales, or a published factor.
    """
    if packed.factor is not None:
        multiplier, divisor = packed.factor.numpy()
        return np.asarray(multiplier / divisor, np.float32)
    if packed.format.encoding.lattice:
        assert packed.scales_zeros is not None
        return packed.scales_zeros[0, : packed.format.rows, int(packed.residual is not None)].float().numpy()
    return np.ones((), np.float32)
