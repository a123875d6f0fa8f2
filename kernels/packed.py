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

from vllm_dymoe.kernels.checks import check_tensor
from vllm_dymoe.kernels.codebook import Codebook

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


def pack(
    format: MatrixFormat,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    section: Tensor,
    order: Tensor | None = None,
) -> None:
    """Write a quantized matrix into a section; bytes that pad are zero, and so is a bias, until it is copied into
    view(section).bias.

    Args:
        format: 8, 4 or 2 bits.
        codes: uint8 [rows, columns], each below 2**bits, in the order of the inputs, which :func:`unpack` restores.
        scales: [rows, groups], exact in the format's dtype.
        zeros: [rows, groups], exact in the format's dtype.
        section: uint8 [nbytes], overwritten.
        order: int64 [columns], the columns as they are to be stored, group by group; only for an act order.

    Raises:
        TypeError: codes or section is not uint8.
        ValueError: a 16-bit or nested format, a wrong shape, a code that does not fit, or an order that is missing, not
            a permutation, or not the format's to hold.
    """
    if not format.quantized:
        raise ValueError("format has 16 bits: such a matrix has no codes, copy its weights into view(section).weight")
    if format.codebook is not None:
        raise ValueError(f"format is {format.codebook.name}, which has no zeros: use pack_floats")
    if format.nested:
        raise ValueError("format is nested: pack_nested writes its two sections")
    check_tensor("codes", codes, dtype=torch.uint8, shape=(format.rows, format.columns), contiguous=False)
    check_tensor("scales", scales, shape=(format.rows, format.groups), contiguous=False)
    check_tensor("zeros", zeros, shape=(format.rows, format.groups), contiguous=False)
    highest = int(codes.max())
    if highest >> format.bits:
        raise ValueError(f"codes holds {highest}, which does not fit {format.bits} bits")
    if (order is not None) != format.act_order:
        raise ValueError(f"order is {'missing' if format.act_order else 'given'}, but act_order is {format.act_order}")
    packed = format.view(section)
    assert packed.scales_zeros is not None
    section.zero_()
    if order is not None and packed.order is not None:
        if not torch.equal(order.sort().values, torch.arange(format.columns)):
            raise ValueError(f"order names not each of the {format.columns} columns once")
        packed.order.copy_(order)
        codes = codes[:, order]

    _store(codes, packed.weight, format)
    packed.scales_zeros[:, : format.rows, 0].copy_(scales.t())
    packed.scales_zeros[:, : format.rows, 1].copy_(zeros.t())


def pack_floats(
    format: MatrixFormat, codes: Tensor, scales: Tensor, section: Tensor, factor: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Write a matrix with a codebook into a section; bytes that pad are zero, and so is a bias.

    Args:
        format: with a codebook.
        codes: uint8 [rows, columns], as published.
        scales: [rows, groups] in the codebook's dtype.
        section: uint8 [nbytes], overwritten.
        factor: what scales are multiplied with, and then divided by; (1, 1) for a codebook without one.

    Raises:
        TypeError: codes, scales or section have another dtype.
        ValueError: a format without a codebook, a wrong shape, a code that does not fit, or a factor too many.
    """
    if format.codebook is None:
        raise ValueError("format has no codebook: use pack")
    check_tensor("codes", codes, dtype=torch.uint8, shape=(format.rows, format.columns), contiguous=False)
    shape, dtype = (format.rows, format.groups), format.codebook.scale_dtype
    check_tensor("scales", scales, dtype=dtype, shape=shape, contiguous=False)
    highest = int(codes.max())
    if highest >> format.bits:
        raise ValueError(f"codes holds {highest}, which does not fit {format.bits} bits")
    packed = format.view(section)
    assert packed.scales is not None
    section.zero_()
    if packed.factor is not None:
        packed.factor.copy_(torch.tensor(factor, dtype=torch.float32))
    elif factor != (1.0, 1.0):
        raise ValueError(f"factor is {factor}, and {format.codebook.name} has none")
    _store(codes, packed.weight, format)
    # As bytes, of which a pad is 0: not every dtype of scales can be padded.
    raw = scales.contiguous().view(torch.uint8).view(format.rows, format.groups, -1)
    raw = torch.nn.functional.pad(raw, (0, 0, 0, 0, 0, format.padded_rows - format.rows))
    raw = raw.view(format.blocks, BLOCK_ROWS, format.groups, -1).transpose(1, 2)
    packed.scales.view(torch.uint8).view(raw.shape).copy_(raw)


def pack_nested(
    format: MatrixFormat,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    base: Tensor,
    fine: Tensor,
    order: Tensor | None = None,
) -> None:
    """Write a matrix of a nested format into the sections of its upper and its lower halves; otherwise as `pack`.

    Args:
        base: uint8 [format.base.nbytes], overwritten.
        fine: uint8 [format.nbytes], overwritten.

    Raises:
        TypeError: codes or a section is not uint8.
        ValueError: as `pack`.
    """
    half = format.bits // 2
    check_tensor("fine", fine, dtype=torch.uint8, shape=(format.nbytes,))
    pack(format.base, codes >> half, scales, zeros, base, order)
    lower = codes & (1 << half) - 1
    _store(lower if order is None else lower[:, order], fine.view(format.weight_shape), format)


def _store(codes: Tensor, weight: Tensor, format: MatrixFormat) -> None:
    """Write codes [rows, columns], or halves of them, in stored order into a section: uint8 [format.weight_shape]."""
    padding = (0, format.padded_columns - format.columns, 0, format.padded_rows - format.rows)
    if any(padding):
        codes = torch.nn.functional.pad(codes, padding)
    first, second = codes.view(-1, 2, PAIR_BYTES, format.padded_columns).unbind(1)  # [blocks, 32, columns]
    if format.stored_bits == 8:
        weight[:, 0].copy_((first >> 4 | second & 0xF0).transpose(1, 2))
        weight[:, 1].copy_((first & 15 | second << 4).transpose(1, 2))
        return
    pairs = (first | second << 4).transpose(1, 2)
    if format.stored_bits == 2:
        halves = pairs.reshape(-1, 2, format.fold // 2 * PAIR_BYTES)
        pairs = (halves[:, 0] | halves[:, 1] << 2).view(format.weight_shape)
    weight.copy_(pairs)


def unpack(packed: PackedMatrix) -> Tensor:
    """The codes of a quantized matrix: uint8 [rows, columns], columns in the order of the inputs.

    Raises:
        ValueError: the matrix has 16 bits, and therefore no codes.
    """
    if not packed.format.quantized:
        raise ValueError("the matrix has 16 bits: it holds weights, not codes")
    return _in_input_order(packed, _stored_codes(packed))


def _stored_codes(packed: PackedMatrix) -> Tensor:
    """uint8 [rows, columns] as they are stored."""
    format = packed.format
    codes = _loaded(packed.weight, format)
    if packed.fine is not None:
        codes = codes << format.stored_bits | _loaded(packed.fine, format)
    return codes[: format.rows, : format.columns]


def _loaded(stored: Tensor, format: MatrixFormat) -> Tensor:
    """Inverse of :func:`_store`: uint8 [padded_rows, padded_columns]."""
    if format.stored_bits == 8:
        return _codes(stored[:, 0]) << 4 | _codes(stored[:, 1])
    if format.stored_bits == 4:
        return _codes(stored)
    halves = stored.view(-1, 1, format.fold // 2 * PAIR_BYTES)
    pairs = torch.cat((halves & 0x33, halves >> 2 & 0x33), 1)
    return _codes(pairs.view(format.blocks, format.padded_columns, PAIR_BYTES))


def dequantize(packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights that a packed matrix stands for: `dtype` [rows, columns], columns in the order of the inputs.

    The arithmetic is float32, or float64 if that is asked for; narrower dtypes are rounded to at the end. With a
    codebook it is that of the tools that publish such codes: scale times factor first, then level times that.
    """
    format = packed.format
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    if packed.scales is not None and format.codebook is not None:
        by_row = packed.scales.to(precise).transpose(1, 2).reshape(format.padded_rows, format.groups)[: format.rows]
        if packed.factor is not None:
            multiplier, divisor = packed.factor.to(precise)
            by_row = by_row * multiplier / divisor
        levels = format.codebook.levels(_stored_codes(packed)).to(precise)
        return (levels * by_row.repeat_interleave(format.group_size, dim=1)[:, : format.columns]).to(dtype)
    if packed.scales_zeros is None:
        return packed.weight.to(dtype)
    scales, zeros = (
        packed.scales_zeros.to(precise)
        .permute(2, 1, 0)[:, : format.rows]
        .repeat_interleave(format.group_size, dim=2)[:, :, : format.columns]
    )
    if format.integer_zeros:
        zeros = zeros * scales
    weights: Tensor = (_stored_codes(packed).to(precise) * format.step - format.center) * scales + zeros
    return _in_input_order(packed, weights.to(dtype))


def _in_input_order(packed: PackedMatrix, stored: Tensor) -> Tensor:
    """Columns [rows, columns] where their inputs are."""
    return stored if packed.order is None else stored[:, packed.order.long().argsort()]


def _codes(pairs: Tensor) -> Tensor:
    """The 4-bit codes of pairs [blocks, columns, 32]: uint8 [rows, columns]."""
    blocks, columns, _ = pairs.shape
    return torch.cat((pairs & 15, pairs >> 4), 2).transpose(1, 2).reshape(blocks * BLOCK_ROWS, columns)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
