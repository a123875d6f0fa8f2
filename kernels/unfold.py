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

# As tensors: a Python number costs another five microseconds in each operation.
_SHIFT = torch.tensor(2, dtype=torch.uint8)
_UPPER_BITS = torch.tensor(0xCC, dtype=torch.uint8)


def unfold_groups(folded: Tensor, first: Tensor, second: Tensor) -> None:
    """4-bit codes of both halves of each group.

    Args:
        folded: uint8 [groups, group_size / 2 * 32], as they lie in a 2-bit section.
        first: uint8 like folded, overwritten with the first half of each group's columns.
        second: uint8 like folded, overwritten with the second half.
    """
    torch.bitwise_left_shift(folded, _SHIFT, out=first)
    first.bitwise_and_(_UPPER_BITS)
    torch.bitwise_and(folded, _UPPER_BITS, out=second)


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
    folded = packed.weight[blocks, columns.start // 2 : columns.stop // 2]
    count, width = folded.shape[0], columns.stop - columns.start
    pairs = scratch[: count * width * PAIR_BYTES].view(count, width, PAIR_BYTES)
    halves = pairs.view(count, width // packed.format.group_size, 2, -1)
    first, second = halves.unbind(2)
    unfold_groups(folded.view(first.shape), first, second)
    return pairs
