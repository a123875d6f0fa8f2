"""Matrices that another tool has quantized, and our sections that hold the same numbers."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels import pack, pack_floats, pack_nested
from vllm_dymoe.residency.code import Code
from vllm_dymoe.residency.matrix import MatrixFormat

# No model has a weight of 2^64, and products with it would leave the range of floats.
_LARGEST_SCALE = 2.0**64


@dataclass(frozen=True, eq=False)
class HeldIntegers:
    """Codes, scales and zero points as a checkpoint has them: weight = (code - zero point) * scale.

    Attributes:
        codes: uint8 [rows, columns].
        scales: float [rows, groups], in the checkpoint's dtype.
        zero_points: uint8 [rows, groups]; the middle code everywhere if the quantization is symmetric.
        column_groups: int64 [columns], the group of each column. Groups are neighbours unless columns were quantized in
            the order of their activations (GPTQ's desc_act, compressed-tensors' actorder "group").
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    column_groups: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, dimension: int, which: slice) -> Self:
        """Some rows (dimension 0) or columns (1)."""
        if dimension == 1:
            return replace(self, codes=self.codes[:, which], column_groups=self.column_groups[which])
        return replace(self, codes=self.codes[which], scales=self.scales[which], zero_points=self.zero_points[which])

    def dequantize(self) -> Tensor:
        """The weights, [rows, columns] in the scales' dtype: one product each, rounded once."""
        groups = self.column_groups
        steps = self.codes.to(torch.int16) - self.zero_points.to(torch.int16)[:, groups]
        return steps.to(self.scales.dtype) * self.scales[:, groups]

    def pack(self, format: MatrixFormat, section: Tensor, base: Tensor | None = None) -> None:
        """Write the same integers and scales into a section, or into two if the format is nested.

        The format's groups may be shorter than the checkpoint's: they share a scale then. With an act order columns are
        sorted by their groups.

        Raises:
            ValueError: the format cannot hold the numbers as they are.
        """
        self.check_scales(format.dtype)
        order = self.column_groups.argsort(stable=True) if format.act_order else None
        stored = self.column_groups if order is None else self.column_groups[order]
        where = "even sorted by their groups" if format.act_order else "as they are"
        first = _first_of_groups(stored, format, f"columns, {where}, do not lie in groups of {{}} neighbours")
        zeros = format.code.midpoint - self.zero_points[:, first].to(torch.int16)
        if not format.integer_zeros and bool(zeros.any()):
            raise ValueError("it has zero points, although its configuration says that it is symmetric.")
        if base is None:
            pack(format, self.codes, self.scales[:, first], zeros, section, order)
        else:
            pack_nested(format, self.codes, self.scales[:, first], zeros, base, section, order)

    def check_scales(self, dtype: torch.dtype) -> None:
        """ValueError for scales that a model's dtype would round, or that are not finite."""
        if not bool(torch.isfinite(self.scales).all()):
            raise ValueError("some of its scales are NaN or infinite; download the checkpoint again.")
        if not torch.equal(self.scales.to(dtype).to(self.scales.dtype), self.scales):
            name, short = (str(kind).removeprefix("torch.") for kind in (self.scales.dtype, dtype))
            halves = self.scales.dtype in (torch.float16, torch.bfloat16)
            advice = f"use dtype {name}" if halves else "use a checkpoint with 16-bit scales"
            raise ValueError(f"its scales are {name} and would be rounded to {short}; {advice}.")


@dataclass(frozen=True, eq=False)
class HeldFloats:
    """Codes and scales as a checkpoint has them: weight = level[code] * (scale * multiplier / divisor).

    Attributes:
        codebook: what codes stand for.
        codes: uint8 [rows, columns].
        scales: in the codebook's dtype [blocks of rows, blocks of columns].
        row_blocks: int64 [rows], the row of scales of each.
        column_blocks: int64 [columns], the column of scales of each.
        factor: multiplier and divisor of all scales, float32 numbers.
        checked: made of a matrix whose numbers have been looked at.

    Raises:
        ValueError: codes or scales that are no numbers, or a scale too large for a weight.
    """

    codebook: Code
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
        if self.codebook.bits == 8 and int((self.codes & 0x7F).max()) > self.codebook.largest:
            raise ValueError(f"some of its weights are NaN; {again}")
        largest = _largest(self.scales)
        if not (math.isfinite(largest) and bool(torch.tensor(self.factor, dtype=torch.float32).isfinite().all())):
            raise ValueError(f"some of its scales are NaN or infinite; {again}")
        if self.factor[1] == 0 or largest > _LARGEST_SCALE:
            raise ValueError(f"some of its scales are too large for a weight; {again}")

    @property
    def bits(self) -> int:
        return self.codebook.bits

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, dimension: int, which: slice) -> Self:
        if dimension == 1:
            return replace(self, codes=self.codes[:, which], column_blocks=self.column_blocks[which], checked=True)
        return replace(self, codes=self.codes[which], row_blocks=self.row_blocks[which], checked=True)

    def filled(self, rows: int, columns: int) -> Self:
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

    def pack(self, format: MatrixFormat, section: Tensor, base: Tensor | None = None) -> None:
        """Write the same codes and scales into a section; ValueError if a group would have two scales."""
        assert format.code == self.codebook
        first = _first_of_groups(self.column_blocks, format, "columns do not lie in groups of {} with one scale")
        # As bytes: not every dtype of scales can be indexed.
        raw = self.scales.contiguous().view(torch.uint8).view(*self.scales.shape, -1)
        chosen = raw.index_select(0, self.row_blocks).index_select(1, first)
        pack_floats(format, self.codes, chosen.view(self.scales.dtype).squeeze(2), section, self.factor)

    def check_scales(self, dtype: torch.dtype) -> None:
        """Nothing: no dtype rounds them."""


Held = HeldIntegers | HeldFloats
"""A matrix whose numbers are taken as they are."""

Matrix = tuple[Tensor | Held, Tensor | None]
"""A projection's weight [rows, columns], and its bias [rows] if it has one."""


def blocks(size: int, block: int | None) -> Tensor:
    """Which block of neighbours each row or column is in: int64 [size]; None for one block."""
    return torch.arange(size) // (block or size)


def unpack_pairs(packed: Tensor) -> Tensor:
    """4-bit codes [rows, columns] of bytes [rows, columns / 2], the first in the low half."""
    # A byte becomes two in one word, whose lower one lies first in memory: twice as fast as writing every second byte.
    words = packed.to(torch.int16)
    both = words << 4
    return both.bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.uint8)


def _first_of_groups(stored: Tensor, format: MatrixFormat, what: str) -> Tensor:
    """The checkpoint's group of each of our groups, given that of each stored column."""
    first = stored[:: format.group_size]
    if not torch.equal(first.repeat_interleave(format.group_size)[: format.columns], stored):
        raise ValueError(
            f"its {what.format(format.group_size)}; set hi to 16 and lo to 0, which hold its dequantized weights, or, "
            "with several ranks, add --enable-expert-parallel."
        )
    return first


def _largest(scales: Tensor) -> float:
    """The largest magnitude; NaN if one is."""
    if scales.dtype.itemsize > 1:
        return float(scales.abs().max())
    # Bytes without their sign are in the order of what they stand for, NaN behind all: many times faster than floats.
    signed = scales.dtype is torch.float8_e4m3fn
    return float((scales.view(torch.uint8) & (0x7F if signed else 0xFF)).max().view(scales.dtype))
