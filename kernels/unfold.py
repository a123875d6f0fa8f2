"""A 2-bit section as the 4-bit one that holds the same weights, or as half of one.

A 2-bit code c stands for the 4-bit code 4c at a quarter of the scale:
(4c - 8) * scale / 4 = (c - 2) * scale. The factor is a power of two, so nothing
is rounded, and three byte operations make a 4-bit block of a 2-bit one. The upper
half of a 4-bit code stands for 4c at the whole scale, and a lower half adds to that.
"""

import torch
from torch import Tensor

from vllm_dymoe.residency.matrix import PAIR_BYTES, PackedMatrix

SCALE_FACTOR = 0.25
"""What the scales of an unfolded matrix are to be multiplied with."""

# As tensors: a Python number costs another five microseconds in each operation.
_SHIFT = torch.tensor(2, dtype=torch.uint8)
_UPPER_BITS = torch.tensor(0xCC, dtype=torch.uint8)
_LOWER_BITS = torch.tensor(0x33, dtype=torch.uint8)


def unfold_groups(folded: Tensor, first: Tensor, second: Tensor) -> None:
    """4-bit codes of both halves of each part of the columns.

    Args:
        folded: uint8 [parts, fold / 2 * 32], as they lie in a 2-bit section.
        first: uint8 like folded, overwritten with the first half of each part's columns.
        second: uint8 like folded, overwritten with the second half.
    """
    torch.bitwise_left_shift(folded, _SHIFT, out=first)
    first.bitwise_and_(_UPPER_BITS)
    torch.bitwise_and(folded, _UPPER_BITS, out=second)


def add_lower_halves(fine: Tensor, first: Tensor, second: Tensor) -> None:
    """Make whole codes of what unfold_groups left.

    Args:
        fine: the lower halves, as they lie in a nested section.
        first: as unfold_groups left it.
        second: the same.
    """
    first.bitwise_or_(fine & _LOWER_BITS)
    second.bitwise_or_((fine >> _SHIFT).bitwise_and_(_LOWER_BITS))


def unfold(packed: PackedMatrix, blocks: slice, columns: slice, scratch: Tensor) -> Tensor:
    """4-bit codes of a part of a 2-bit matrix, or of a nested one of 4 bits.

    Args:
        packed: 2 bits, or 4 in two sections.
        blocks: which blocks of 64 rows.
        columns: which columns; both ends on a group.
        scratch: uint8, contiguous, at least 32 bytes for each column of each block; its beginning is overwritten.

    Returns:
        uint8 [blocks, columns, 32], a view of scratch.
    """
    folded_columns = slice(columns.start // 2, columns.stop // 2)
    folded = packed.weight[blocks, folded_columns]
    count, width = folded.shape[0], columns.stop - columns.start
    pairs = scratch[: count * width * PAIR_BYTES].view(count, width, PAIR_BYTES)
    halves = pairs.view(count, width // packed.format.fold, 2, -1)
    first, second = halves.unbind(2)
    unfold_groups(folded.view(first.shape), first, second)
    if packed.fine is not None:
        add_lower_halves(packed.fine[blocks, folded_columns].view(first.shape), first, second)
    return pairs
