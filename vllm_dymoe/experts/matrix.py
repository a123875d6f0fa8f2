"""One packed matrix: a weight [rows, columns] as one section of bytes.

Weights have 16, 8, 4 or 2 bits. The layout serves every reader without repacking: a CPU reads two or four columns of 64
rows at a time, and a GPU program that handles 64 rows reads whole cache lines. Byte offsets and a worked example:
docs/format.md.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.experts.encoding import Encoding

BLOCK_ROWS = 64  # rows that are interleaved; quantized matrices are padded to whole blocks

PAIR_BYTES = 32
"""Bytes of the 4-bit codes of one block's column: row e in the low half of byte e, row e + 32 in the high half."""

FOLD_COLUMNS = 64  # most columns whose 2-bit codes share bytes; as many as one warp's strip of 4-bit codes has

GROUP_SIZES = (32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
ADDRESS_ALIGNMENT = 16

_SECTION_ALIGNMENT = 256
_MOST_ACT_ORDER_COLUMNS = 32768  # places are 16-bit numbers


@dataclass(frozen=True)
class MatrixFormat:
    """How one weight matrix is packed.

    TypeError for an unsupported dtype. ValueError for a size or group size that the encoding does not support, for
    integer zeros or a column order with an encoding that is not a grid, or for an order of more than 32768 columns.
    """

    rows: int  # outputs N of the projection; 0, without bytes, for a missing gate
    columns: int  # inputs K
    encoding: Encoding
    """How bits become numbers. With a nested encoding the section holds only the lower halves of codes; everything
    else is in a section of `base`.
    """
    group_size: int  # adjacent columns of a row that share a scale; unused at 16 bits
    dtype: torch.dtype  # of scales and zeros, of the bias, and of the weights at 16 bits; bfloat16 or float16
    bias: bool = False  # whether a bias for each row follows the weights
    integer_zeros: bool = False
    """Whether zeros count steps of their scale: weight = (code - midpoint + zero) * scale. Checkpoints of other
    tools have integer zero points, whose product with the scale `dtype` could not hold exactly.
    """
    act_order: bool = False
    """Whether columns are stored in another order than the inputs'; the order follows the bias. GPTQ quantizes
    columns in the order of their activations (desc_act), so its groups are scattered over a row; columns are stored
    so that groups are contiguous again.
    """
    rotation: int = 0  # adjacent inputs that are rotated together before they are multiplied; 0 except for lattices

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 1:
            raise ValueError(f"a matrix needs at least 0 rows and 1 column, got {self.rows} x {self.columns}")
        sizes = (self.encoding.group_size,) if self.encoding.group_size else GROUP_SIZES
        if self.quantized and self.group_size not in sizes:
            raise ValueError(f"group_size is {self.group_size}, expected one of {', '.join(map(str, sizes))}")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype}, expected torch.bfloat16 or torch.float16")
        if (self.integer_zeros or self.act_order) and (
            self.encoding.floats or self.encoding.lattice or not self.quantized
        ):
            what = "integer_zeros" if self.integer_zeros else "act_order"
            raise ValueError(
                f"{what} is set for the code {self.encoding.name}, which supports neither zeros nor an order"
            )
        if self.act_order and self.columns > _MOST_ACT_ORDER_COLUMNS:
            raise ValueError(f"act_order is set for {self.columns} columns, expected at most {_MOST_ACT_ORDER_COLUMNS}")

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def nested(self) -> bool:
        return self.encoding.nested

    @property
    def quantized(self) -> bool:
        """Whether the weights are codes with scales, that is, below 16 bits."""
        return self.encoding.bits < 16

    @cached_property
    def base(self) -> "MatrixFormat":
        return replace(self, encoding=self.encoding.base)

    @cached_property
    def fold(self) -> int:
        """Number of adjacent columns whose 2-bit codes share bytes.

        A byte holds codes of the first half of these columns and of the second half.
        """
        halves = self.encoding.nested or self.encoding.upper_of
        return min(self.group_size, FOLD_COLUMNS) if halves else self.group_size

    @cached_property
    def padded_rows(self) -> int:
        """Number of stored rows: whole blocks of 64, or exactly the rows at 16 bits."""
        return _round_up(self.rows, BLOCK_ROWS) if self.quantized else self.rows

    @cached_property
    def padded_columns(self) -> int:
        """Number of stored columns: whole groups, or exactly the columns at 16 bits."""
        return _round_up(self.columns, self.group_size) if self.quantized else self.columns

    @cached_property
    def groups(self) -> int:
        if self.encoding.lattice:
            return 1
        return self.padded_columns // self.group_size if self.quantized else 0

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight view: bytes below 16 bits, `dtype` at 16."""
        stored, blocks = self.encoding.stored_bits, self.padded_rows // BLOCK_ROWS
        if stored == 16:
            return self.rows, self.columns
        if stored == 8:
            return blocks, 2, self.padded_columns, PAIR_BYTES
        return blocks, self.padded_columns * stored // 4, PAIR_BYTES

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without the padding after them."""
        return self.padded_rows * self.padded_columns * self.encoding.stored_bits // 8

    @cached_property
    def scales_offset(self) -> int:
        """Offset of the scales in the section; like all offsets a multiple of 256."""
        return _round_up(self.weight_bytes, _SECTION_ALIGNMENT)

    @cached_property
    def bias_offset(self) -> int:
        """Offset of the bias in the section, if there is one.

        The 256 bytes before it hold the matrix's factor, if the encoding has one.
        """
        factor = _SECTION_ALIGNMENT if self.encoding.has_factor else 0
        return _round_up(self.scales_offset + _scales_bytes(self), _SECTION_ALIGNMENT) + factor

    @cached_property
    def order_offset(self) -> int:
        """Offset of the column order in the section, if it has one."""
        bias_bytes = _round_up(self.padded_rows * self.dtype.itemsize, _SECTION_ALIGNMENT) if self.bias else 0
        return self.bias_offset + bias_bytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the section, a multiple of 256."""
        if self.encoding.nested:
            return self.weight_bytes
        order_bytes = _round_up(self.padded_columns * 2, _SECTION_ALIGNMENT) if self.act_order and self.rows else 0
        return self.order_offset + order_bytes

    def view(self, section: Tensor, base: "PackedMatrix | None" = None) -> "PackedMatrix":
        """View a section of bytes as a packed matrix, without copying.

        ``section`` is uint8 [nbytes], contiguous and 16-byte aligned. A nested matrix needs its base section as well.
        Raises TypeError or ValueError for other bytes or another base.
        """
        check_tensor("section", section, dtype=torch.uint8, shape=(self.nbytes,))
        if section.data_ptr() % ADDRESS_ALIGNMENT or section.storage_offset() % ADDRESS_ALIGNMENT:
            raise ValueError(
                f"section begins at address {section.data_ptr():#x}, offset {section.storage_offset()} of its storage; "
                f"both must be multiples of {ADDRESS_ALIGNMENT}"
            )
        if (base.format if base else None) != (self.base if self.nested else None):
            raise ValueError(f"base is {base and base.format}, expected {self.base if self.nested else None}")
        stored = section[: self.weight_bytes]
        if base is not None:
            return replace(base, format=self, residual=stored.view(self.weight_shape))
        bias = section[self.bias_offset :].view(self.dtype)[: self.rows] if self.bias else None
        if not self.quantized:
            return PackedMatrix(self, stored.view(self.dtype).view(self.weight_shape), None, bias)
        weight = stored.view(self.weight_shape)
        scales = section[self.scales_offset : self.scales_offset + _scales_bytes(self)]
        if self.encoding.scale_dtype is None:
            scales = scales.view(self.dtype).view(self.groups, self.padded_rows, 2)
            ordered = self.act_order and self.rows
            order = section[self.order_offset :].view(torch.int16)[: self.columns] if ordered else None
            return PackedMatrix(self, weight, scales, bias, order)
        scales = scales.view(self.encoding.scale_dtype).view(-1, self.groups, BLOCK_ROWS)
        factor_at = self.bias_offset - _SECTION_ALIGNMENT
        factor = section[factor_at : factor_at + 8].view(torch.float32) if self.encoding.has_factor else None
        return PackedMatrix(self, weight, None, bias, scales=scales, factor=factor)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Views into one section; nothing is copied."""

    format: MatrixFormat  # what the bytes mean
    weight: Tensor
    """uint8 [blocks, columns, 32] at 4 bits, [blocks, columns / 2, 32] at 2, [blocks, 2, columns, 32] at 8 (columns
    padded to whole groups); `dtype` [rows, columns] at 16."""
    scales_zeros: Tensor | None
    """`dtype` [groups, padded_rows, 2], scale then zero, of a lattice the scales of the low and the high reading; None
    at 16 bits and for published floats."""
    bias: Tensor | None = None  # `dtype` [rows]; None where the format has none
    order: Tensor | None = None
    """int16 [columns], the input that each stored column multiplies; None where that is its own place."""
    scales: Tensor | None = None  # of published floats, in their code's dtype [blocks, groups, 64]; None for others
    factor: Tensor | None = None
    """float32 [2], what all scales are multiplied with and then divided by; None where the code has none. Published
    tools do either of both, and a reciprocal would not be exact."""
    residual: Tensor | None = None
    """The lower halves of codes whose upper halves are in weight, and of its shape; None if it has whole codes."""

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Addresses of weight, scales, bias, column order and residual section.

        Parts that the matrix does not have are 0.
        """
        scales = self.scales_zeros if self.scales is None else self.scales
        parts = self.weight, scales, self.bias, self.order, self.residual
        weight, scales_at, bias, order, residual = (0 if part is None else part.data_ptr() for part in parts)
        return weight, scales_at, bias, order, residual


def _scales_bytes(format: MatrixFormat) -> int:
    dtype = format.encoding.scale_dtype
    return format.groups * format.padded_rows * (dtype.itemsize if dtype else 2 * format.dtype.itemsize)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
