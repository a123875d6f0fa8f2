"""One packed matrix: a weight [rows, columns] at 16, 8, 4 or 2 bits as one section of bytes.

The layout serves every reader without repacking. At 4 bits it is byte for byte
what torch's AVX512 int4 kernel reads, at 2 and 8 bits it becomes that with two
byte operations or none, and a GPU program that owns 64 rows reads whole cache
lines. Byte offsets and a worked example: docs/format.md.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vllm_dymoe.residency.checks import check_tensor
from vllm_dymoe.residency.code import Codebook

BLOCK_ROWS = 64
"""Rows that are interleaved; quantized matrices are padded to whole blocks."""

PAIR_BYTES = 32
"""Bytes that hold the 4-bit codes of one block's column: row e in the low half of byte e, row e + 32 in the high."""

FOLD_COLUMNS = 64
"""Columns that share the bytes of a half, at most; those that one warp's strip of 4-bit codes has."""

GROUP_SIZES = (32, 64, 128, 256)
BIT_WIDTHS = (16, 8, 4, 2)
DTYPES = (torch.bfloat16, torch.float16)

_SECTION_ALIGNMENT = 256
_ADDRESS_ALIGNMENT = 16
_MOST_ACT_ORDER_COLUMNS = 32768  # places are 16-bit numbers


@dataclass(frozen=True)
class MatrixFormat:
    """How one logical weight is packed.

    Attributes:
        rows: outputs N of the projection; 0, and no bytes, for the gate of experts that have none.
        columns: inputs K.
        bits: 16, 8, 4 or 2 per weight.
        group_size: neighbouring columns of one row that share a scale and a zero; without meaning at 16 bits.
        dtype: of scales and zeros, of the bias, and of the weights at 16 bits; bfloat16 or float16.
        bias: whether a bias for each row lies behind the weights.
        integer_zeros: whether zeros count steps of their scale: weight = (code - midpoint + zero) * scale. What other
            tools quantized has integer zero points, whose product with the scale `dtype` could not hold exactly.
        act_order: whether columns are stored in another order than that of the inputs, which lies behind the bias. GPTQ
            quantizes columns in the order of their activations (desc_act), and its groups lie scattered over a row;
            columns are stored so that groups are neighbours again.
        codebook: what codes stand for where they are floats, see :class:`vllm_dymoe.kernels.Codebook`; such a matrix
            has scales without zeros, in the codebook's own dtype. None for codes that are steps of a grid.
        nested: whether the section holds the lower halves of codes only; everything else is in a section of `base`.
        upper_of: bits of the codes whose upper halves these are, 0 for whole codes. Scale and zero are those of the
            whole code, which is taken to be in the middle of those with this half.

    Raises:
        ValueError: a size, bit-width or group size that the format does not have, integer zeros or an order of columns
            at 16 bits or with a codebook, an order of more than 32768 columns, or halves of codes that have none.
        TypeError: another dtype.
    """

    rows: int
    columns: int
    bits: int
    group_size: int
    dtype: torch.dtype
    bias: bool = False
    integer_zeros: bool = False
    act_order: bool = False
    codebook: Codebook | None = None
    nested: bool = False
    upper_of: int = 0

    def __post_init__(self) -> None:
        if self.rows < 0 or self.columns < 1:
            raise ValueError(f"a matrix needs no fewer than 0 rows and 1 column, got {self.rows} x {self.columns}")
        if self.bits not in BIT_WIDTHS:
            raise ValueError(f"bits is {self.bits}, expected one of {', '.join(map(str, BIT_WIDTHS))}")
        if self.codebook is not None:
            self._check_codebook(self.codebook)
        elif self.bits < 16 and self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size}, expected one of {', '.join(map(str, GROUP_SIZES))}")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype}, expected torch.bfloat16 or torch.float16")
        if self.integer_zeros and not self.quantized:
            raise ValueError("integer_zeros is set for 16 bits, which have no zeros")
        if self.act_order and not self.quantized:
            raise ValueError("act_order is set for 16 bits, which have no groups")
        if self.nested and self.bits not in (8, 4):
            raise ValueError(f"nested is set for {self.bits} bits, expected 8 or 4")
        if self.upper_of and (self.nested or self.bits not in (4, 2) or self.upper_of != 2 * self.bits):
            raise ValueError(f"upper_of is {self.upper_of} for {self.bits} bits, expected 8 for 4 or 4 for 2")
        if self.act_order and self.columns > _MOST_ACT_ORDER_COLUMNS:
            raise ValueError(f"act_order is set for {self.columns} columns, expected at most {_MOST_ACT_ORDER_COLUMNS}")

    def _check_codebook(self, codebook: Codebook) -> None:
        if self.bits != codebook.bits:
            raise ValueError(f"bits is {self.bits}, but codes of {codebook.name} have {codebook.bits}")
        sizes = GROUP_SIZES if codebook.group_size is None else (codebook.group_size,)
        if self.group_size not in sizes:
            raise ValueError(f"group_size is {self.group_size}, expected {' or '.join(map(str, sizes))}")
        if self.integer_zeros or self.act_order:
            raise ValueError(f"{codebook.name} has neither zeros nor an order of columns")
        if self.nested or self.upper_of:
            raise ValueError(f"{codebook.name} has no halves: the upper half of a float is no float of its own")

    @property
    def tag(self) -> int:
        """What stands for the format in kernels' tables: its bits, or its codebook's tag."""
        return self.bits if self.codebook is None else self.codebook.tag

    @property
    def quantized(self) -> bool:
        """Whether the weights are codes with scales, that is, below 16 bits."""
        return self.bits < 16

    @property
    def midpoint(self) -> int:
        """The code whose weight is the group's zero: weight = (code - midpoint) * scale + zero (see integer_zeros)."""
        return 1 << (self.bits - 1)

    @cached_property
    def step(self) -> int:
        """Whole codes between two neighbouring ones: 1, or 4 or 16 for upper halves."""
        return 1 << (self.upper_of - self.bits) if self.upper_of else 1

    @cached_property
    def center(self) -> float:
        """weight = (step * code - center) * scale + zero: the midpoint, or 6.5 or 120.5 for upper halves."""
        return (1 << (self.upper_of or self.bits) - 1) - (self.step - 1) / 2

    @cached_property
    def base(self) -> "MatrixFormat":
        """The format of the section with the upper halves, if this one is nested."""
        return replace(self, bits=self.bits // 2, nested=False, upper_of=self.bits)

    @cached_property
    def fold(self) -> int:
        """Neighbouring columns whose 2-bit codes share bytes, the first half of them with the second."""
        return min(self.group_size, FOLD_COLUMNS) if self.nested or self.upper_of else self.group_size

    @cached_property
    def stored_bits(self) -> int:
        """Bits of each code that the section holds."""
        return self.bits // 2 if self.nested else self.bits

    @cached_property
    def padded_rows(self) -> int:
        """Rows that are stored: whole blocks of 64, or just the rows at 16 bits."""
        return _round_up(self.rows, BLOCK_ROWS) if self.quantized else self.rows

    @cached_property
    def padded_columns(self) -> int:
        """Columns that are stored: whole groups, or just the columns at 16 bits."""
        return _round_up(self.columns, self.group_size) if self.quantized else self.columns

    @cached_property
    def blocks(self) -> int:
        """Blocks of 64 rows; 0 at 16 bits."""
        return self.padded_rows // BLOCK_ROWS if self.quantized else 0

    @cached_property
    def groups(self) -> int:
        """Groups along the columns of one row; 0 at 16 bits."""
        return self.padded_columns // self.group_size if self.quantized else 0

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight view: of bytes below 16 bits, of `dtype` at 16."""
        if self.bits == 16:
            return self.rows, self.columns
        if self.stored_bits == 8:
            return self.blocks, 2, self.padded_columns, PAIR_BYTES
        return self.blocks, self.padded_columns * self.stored_bits // 4, PAIR_BYTES

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without the padding behind them."""
        return self.padded_rows * self.padded_columns * self.stored_bits // 8

    @cached_property
    def scales_offset(self) -> int:
        """Byte of the section where scales and zeros begin; a multiple of 256."""
        return _round_up(self.weight_bytes, _SECTION_ALIGNMENT)

    @cached_property
    def bias_offset(self) -> int:
        """Byte of the section where the bias begins, or would begin; a multiple of 256."""
        if self.codebook is not None:
            scale_bytes = self.groups * self.padded_rows * self.codebook.scale_dtype.itemsize
            return _round_up(self.scales_offset + scale_bytes, _SECTION_ALIGNMENT) + self._factor_bytes
        # Scales and zeros of one group of one block are 256 bytes: nothing is left to round up.
        return self.scales_offset + self.groups * self.padded_rows * 2 * self.dtype.itemsize

    @property
    def _factor_bytes(self) -> int:
        """Bytes in front of the bias that hold the factor, padded."""
        return _SECTION_ALIGNMENT if self.codebook is not None and self.codebook.has_factor else 0

    @cached_property
    def order_offset(self) -> int:
        """Byte of the section where the order of columns begins, or would begin; a multiple of 256."""
        bias_bytes = _round_up(self.padded_rows * self.dtype.itemsize, _SECTION_ALIGNMENT) if self.bias else 0
        return self.bias_offset + bias_bytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the section; a multiple of 256."""
        if self.nested:
            return self.weight_bytes
        order_bytes = _round_up(self.padded_columns * 2, _SECTION_ALIGNMENT) if self.act_order and self.rows else 0
        return self.order_offset + order_bytes

    def view(self, section: Tensor, base: "PackedMatrix | None" = None) -> "PackedMatrix":
        """See a section's bytes as a packed matrix, without copying.

        Args:
            section: uint8 [nbytes], contiguous, at an address that is a multiple of 16.
            base: the upper halves, of the format `base`, if this one is nested.

        Raises:
            TypeError: not uint8.
            ValueError: another size, not contiguous, not aligned, or a base that is missing or another one.
        """
        check_tensor("section", section, dtype=torch.uint8, shape=(self.nbytes,))
        if section.data_ptr() % _ADDRESS_ALIGNMENT or section.storage_offset() % _ADDRESS_ALIGNMENT:
            raise ValueError(
                f"section begins at address {section.data_ptr():#x}, offset {section.storage_offset()} of its storage; "
                f"both must be multiples of {_ADDRESS_ALIGNMENT}"
            )
        stored = section[: self.weight_bytes]
        if (base.format if base else None) != (self.base if self.nested else None):
            raise ValueError(f"base is {base and base.format}, expected {self.base if self.nested else None}")
        if base is not None:
            return replace(base, format=self, fine=stored.view(self.weight_shape))
        bias = section[self.bias_offset :].view(self.dtype)[: self.rows] if self.bias else None
        if not self.quantized:
            return PackedMatrix(self, stored.view(self.dtype).view(self.weight_shape), None, bias)
        if self.codebook is not None:
            return self._view_codebook(self.codebook, section, bias)
        scales_zeros = section[self.scales_offset : self.bias_offset].view(self.dtype)
        order = section[self.order_offset :].view(torch.int16)[: self.columns] if self.act_order and self.rows else None
        return PackedMatrix(
            self, stored.view(self.weight_shape), scales_zeros.view(self.groups, self.padded_rows, 2), bias, order
        )

    def _view_codebook(self, codebook: Codebook, section: Tensor, bias: Tensor | None) -> "PackedMatrix":
        shape = self.blocks, self.groups, BLOCK_ROWS
        scales_end = self.scales_offset + self.groups * self.padded_rows * codebook.scale_dtype.itemsize
        scales = section[self.scales_offset : scales_end].view(codebook.scale_dtype).view(shape)
        factor = None
        if codebook.has_factor:
            factor = section[self.bias_offset - self._factor_bytes :].view(torch.float32)[:2]
        weight = section[: self.weight_bytes].view(self.weight_shape)
        return PackedMatrix(self, weight, None, bias, scales=scales, factor=factor)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Zero-copy views into one section.

    Attributes:
        format: what the bytes mean.
        weight: uint8 [blocks, columns, 32] at 4 bits, [blocks, columns / 2, 32] at 2, [blocks, 2, columns, 32] at 8
            (columns padded to whole groups); `dtype` [rows, columns] at 16.
        scales_zeros: `dtype` [groups, padded_rows, 2], scale then zero; None at 16 bits and with a codebook.
        bias: `dtype` [rows]; None where the format has none.
        order: int16 [columns], the input that each stored column multiplies; None where that is its own place.
        scales: with a codebook, in its dtype [blocks, groups, 64]; None without one.
        factor: float32 [2], what all scales are multiplied with and then divided by; None where the codebook has none.
            Published tools do either of both, and a reciprocal would not be exact.
        fine: the lower halves of codes whose upper halves are in weight, and of its shape; None if it has whole codes.
    """

    format: MatrixFormat
    weight: Tensor
    scales_zeros: Tensor | None
    bias: Tensor | None = None
    order: Tensor | None = None
    scales: Tensor | None = None
    factor: Tensor | None = None
    fine: Tensor | None = None

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Where weight, scales, bias, order and the fine part lie; 0 for those that there are not."""
        scales = self.scales_zeros if self.scales is None else self.scales
        parts = self.weight, scales, self.bias, self.order, self.fine
        weight, scales_at, bias, order, fine = (0 if part is None else part.data_ptr() for part in parts)
        return weight, scales_at, bias, order, fine

    @cached_property
    def byte_rows(self) -> Tensor:
        """Weight as torch's int4 kernel takes it: uint8 [padded_rows, bytes of a row] (not at 16 bits)."""
        return self.weight.view(self.format.padded_rows, -1)

    @cached_property
    def folded(self) -> Tensor:
        """2-bit codes, those that fold onto one another in each row: uint8 [any, fold / 2 * 32]."""
        return self.weight.view(-1, self.format.fold // 2 * PAIR_BYTES)

    @cached_property
    def scales_zeros_rows(self) -> Tensor:
        """Scales and zeros, one group in each row: [groups, padded_rows * 2] (not at 16 bits)."""
        assert self.scales_zeros is not None
        return self.scales_zeros.view(self.format.groups, -1)

    def in_stored_order(self, x: Tensor) -> Tensor:
        """Inputs [n, columns] as the stored columns meet them: x itself, or a new tensor."""
        if self.order is None:
            return x
        # Half as dear as index_select along a row, and as dear for a single one.
        return x.gather(1, self.order.long().expand(x.shape[0], -1))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
