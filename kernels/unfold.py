"""A 2-bit section as the 4-bit one that holds the same weights.

A 2-bit code c stands for the 4-bit code 4c at a quarter of the scale:
(4c - 8) * scale / 4 = (c - 2) * scale. The factor is a power of two, so nothing
is rounded, and three byte operations make a 4-bit block of a 2-bit one.
"""

import torch
from torch import Tensor

from vllm_dymoe.kernels.packed import PAIR_BYTES, PackedMatrix

SCALE_FACTOR = 0.25
"""What the scales of an unfolded matrix are to be multiplied with."""


def unfold(packed: PackedMatrix, blocks: slice, columns: slice, scratch: Tensor) -> Tensor:
    """4-bit codes of a part of a 2-bit matrix.

    Args:
        packed: 2 bits.
        blocks: which blocks of 64 rows.
        columns: which columns; both ends on a group.
        scratch: uint8, contiguous, at least 32 bytes for each column of each block; its beginning is overwritten.

    Returns:
        uint8 [blocks, columns, 32], a view of scratch.
    """
    half_group = packed.format.group_size // 2
    folded = packed.weight[blocks, columns.start // 2 : columns.stop // 2]
    count, width = folded.shape[0], 2 * folded.shape[1]
    folded = folded.view(count, -1, half_group * PAIR_BYTES)
    pairs = scratch[: count * width * PAIR_BYTES].view(count, width, PAIR_BYTES)
    halves = pairs.view(count, -1, 2, half_group * PAIR_BYTES)
    torch.bitwise_left_shift(folded, 2, out=halves[:, :, 0])
    halves[:, :, 0].bitwise_and_(0xCC)
    torch.bitwise_and(folded, 0xCC, out=halves[:, :, 1])
    return pairs
