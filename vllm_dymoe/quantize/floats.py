"""A matrix that was published in small floats, and our section that holds the same codes and scales."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels import pack_floats
from vllm_dymoe.residency.code import Codebook
from vllm_dymoe.residency.matrix import MatrixFormat

# A weight of 2^64 is nobody's, and products with it would leave the range of floats.
_LARGEST_SCALE = 2.0**64


@dataclass(frozen=True, eq=False)
class FloatMatrix:
    """Codes and scales as a checkpoint has them: weight = level[code] * (scale * multiplier / divisor).

    Attributes:
        codebook: what codes stand for.
        codes: uint8 [rows, columns].
        scales: in the codebook's dtype [blocks of rows, blocks of columns].
        row_blocks: int64 [rows], the row of scales of each.
        column_blocks: int64 [columns], the column of scales of each.
        factor: multiplier and divisor of all scales, float32 numbers.
        checked: whether it is made of another one, whose numbers have been looked at.

    Raises:
        ValueError: codes or scales that are no numbers, or a scale too large for a weight.
    """

    codebook: Codebook
    codes: Tensor
    scales: Tensor
    row_blocks: Tensor
    column_blocks: Tensor
    factor: tuple[float, float] = (1.0, 1.0)
    checked: bool = False

    def __post_init__(self) -> None:
        if self.checked:
            return
        again = "download the checkpoint again."
        if self.codebook.bits == 8 and int((self.codes & 0x7F).max()) == 0x7F:
            raise ValueError(f"some of its weights are NaN; {again}")
        largest = _largest(self.scales)
        if not (math.isfinite(largest) and bool(torch.tensor(self.factor, dtype=torch.float32).isfinite().all())):
            raise ValueError(f"some of its scales are NaN or infinite; {again}")
        if self.factor[1] == 0 or largest > _LARGEST_SCALE:
            raise ValueError(f"some of its scales are too large for a weight; {again}")

    @property
    def bits(self) -> int:
        """Per code."""
        return self.codebook.bits

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return self.codes.shape

    def narrow(self, dimension: int, start: int, length: int) -> "FloatMatrix":
        """Some rows (dimension 0) or columns (1), as torch.narrow; what tensor parallelism gives a rank."""
        codes = self.codes.narrow(dimension, start, length)
        if dimension == 0:
            return replace(self, codes=codes, row_blocks=self.row_blocks.narrow(0, start, length), checked=True)
        return replace(self, codes=codes, column_blocks=self.column_blocks.narrow(0, start, length), checked=True)

    def rows(self, which: slice) -> "FloatMatrix":
        """Some rows, with strides."""
        return replace(self, codes=self.codes[which], row_blocks=self.row_blocks[which], checked=True)

    def filled(self, rows: int, columns: int) -> "FloatMatrix":
        """A matrix of this shape with zeros behind the last row and column."""
        below, right = rows - self.shape[0], columns - self.shape[1]
        return replace(
            self,
            codes=F.pad(self.codes, (0, right, 0, below)),
            row_blocks=torch.cat((self.row_blocks, self.row_blocks[-1:].expand(below))),
            column_blocks=torch.cat((self.column_blocks, self.column_blocks[-1:].expand(right))),
            checked=True,
        )

    def dequantize(self) -> Tensor:
        """The weights, float32 [rows, columns], in the order of operations of the tools that wrote them."""
        multiplier, divisor = torch.tensor(self.factor, dtype=torch.float32)
        scales = self.scales.float() * multiplier / divisor
        return self.codebook.levels(self.codes) * scales[self.row_blocks][:, self.column_blocks]

    def pack(self, format: MatrixFormat, section: Tensor) -> None:
        """Write the same codes and scales into a section.

        Args:
            format: with the same codebook. Its groups may be shorter than the checkpoint's blocks: they share a scale.
            section: uint8 [format.nbytes], overwritten.

        Raises:
            ValueError: a group of the format would have two scales.
        """
        assert format.codebook == self.codebook
        first = self.column_blocks[:: format.group_size]  # of each of our groups
        if not torch.equal(first.repeat_interleave(format.group_size)[: format.columns], self.column_blocks):
            raise ValueError(
                f"its columns do not lie in groups of {format.group_size} with one scale; set hi to 16 and lo to 0, "
                "which hold its dequantized weights, or, with several ranks, add --enable-expert-parallel."
            )
        # As bytes: not every dtype of scales can be indexed.
        raw = self.scales.contiguous().view(torch.uint8).view(*self.scales.shape, -1)
        chosen = raw.index_select(0, self.row_blocks).index_select(1, first)
        pack_floats(format, self.codes, chosen.view(self.scales.dtype).squeeze(2), section, self.factor)


def _largest(scales: Tensor) -> float:
    """The largest magnitude; NaN if one is."""
    if scales.dtype.itemsize > 1:
        return float(scales.abs().max())
    # Bytes without their sign are in the order of what they stand for, NaN behind all: many times faster than floats.
    signed = scales.dtype is torch.float8_e4m3fn
    return float((scales.view(torch.uint8) & (0x7F if signed else 0xFF)).max().view(scales.dtype))


def blocks(size: int, block: int | None) -> Tensor:
    """Which block each row or column is in: int64 [size]; None for one block."""
    return torch.arange(size) // (block or size)


def unpack_pairs(packed: Tensor) -> Tensor:
    """4-bit codes [rows, columns] of bytes [rows, columns / 2], the first in the low half."""
    # A byte becomes two in one word, whose lower one lies first in memory: twice as fast as writing every second byte.
    words = packed.to(torch.int16)
    both = words << 4
    return both.bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.uint8)
