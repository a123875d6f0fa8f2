"""A linear layer on torch's own int4 kernel: few tokens, bfloat16, a CPU with AVX512.

The kernel reads packed bytes where they lie, dequantizes in registers and
accumulates each row in float32 in one order, so a token's result depends neither
on the address of the weights nor on the other tokens of the batch. It computes
(code - 8) * scale + zero on 4-bit codes. A 2-bit matrix unfolds to that; an
8-bit code 16 h + l is two of them, one beside the other:

    (16 h + l - 128) * scale + zero = [(h - 8) * 16 scale + zero] + [(l - 8) * scale + 8 scale]

so a block whose high codes are followed by its low codes is a block of twice the
columns, and x beside itself meets it in one call, with one rounding at the end.
All factors are powers of two: the scales stay exact. Nested codes give what those of one
section do, to the last bit: at 4 bits through a kernel of our own (halves), or put together
in the workspace where that cannot be compiled, as at 8 bits.

The upper half h of a code is (4 h - 6.5) * scale + zero at 2 bits, and (16 h - 120.5) * scale + zero
at 4: of what the kernel takes only the zeros, zero + 1.5 scale and zero + 7.5 scale, are rounded to bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.combine import compiled_operations
from vllm_dymoe.kernels.unfold import SCALE_FACTOR, add_lower_halves, unfold_groups
from vllm_dymoe.residency.matrix import BLOCK_ROWS, PAIR_BYTES, MatrixFormat, PackedMatrix

Linear = Callable[[Tensor, PackedMatrix], Tensor]
_int4_linear = torch._weight_int4pack_mm_for_cpu

# As tensors: a Python number costs another five microseconds in each operation.
_LOW_WORD = torch.tensor(0xFFFF, dtype=torch.int32)
_IN_BOTH_WORDS = torch.tensor(0x10001, dtype=torch.int32)


def int4_available() -> bool:
    """Whether this machine's int4 kernel reads our layout; with AVX2 or on ARM it reads another."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


class Int4Linear:
    """x @ weight.T + bias for a packed weight of 8, 4 or 2 bits.

    Args:
        workspace: uint8 on the CPU, for what 2 and 8 bits need on their way to 4. Its contents are overwritten.
    """

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace
        self._plans: dict[MatrixFormat, Sequence[Linear]] = {}
        self._of_halves = _product_of_halves()

    def supports(self, format: MatrixFormat) -> bool:
        """Whether a format can be computed here: a matter of the format and the workspace."""
        # In float16 torch's kernel is scalar code, a hundred times slower. Integer zeros would have to be rounded, and
        # floats are no steps of a grid.
        fast = format.quantized and format.dtype is torch.bfloat16 and not format.integer_zeros
        needed = 0 if self._read_as_they_are(format) else _block_bytes(format)
        return fast and format.codebook is None and needed <= self._workspace.numel()

    def linear(self, format: MatrixFormat) -> Linear:
        """The operation for matrices of one format: bfloat16 [n, columns] to [n, rows], accumulated in float32."""
        padded = format.padded_rows != format.rows or format.padded_columns != format.columns
        product = self._read_as_they_are(format)
        return product if product and not (padded or format.bias or format.act_order) else self

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x bfloat16 [n, columns] times the weight: bfloat16 [n, rows], accumulated in float32; then plus the bias."""
        format = packed.format
        x = packed.in_stored_order(x)
        if format.padded_columns != format.columns:
            x = F.pad(x, (0, format.padded_columns - format.columns))
        product = self._read_as_they_are(format)
        if product is not None:
            result = product(x, packed)
        else:
            if format not in self._plans:
                self._plans[format] = _plan(format, self._workspace)
            x = torch.cat((x, x), 1) if format.bits == 8 else x.contiguous()
            parts = [part(x, packed) for part in self._plans[format]]
            result = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if format.padded_rows != format.rows:
            result = result[:, : format.rows]
        return result if packed.bias is None else result.add_(packed.bias)

    def _read_as_they_are(self, format: MatrixFormat) -> Linear | None:
        """What multiplies padded rows and columns without a workspace, if anything does."""
        if format.bits != 4 or format.code.upper_of:
            return None
        return self._of_halves if format.nested else _four_bits


def _four_bits(x: Tensor, packed: PackedMatrix) -> Tensor:
    """x [n, padded_columns] times the padded rows."""
    assert packed.scales_zeros is not None
    # A result without its padding rows is not contiguous, and comes back here as input.
    return _int4_linear(x.contiguous(), packed.byte_rows, packed.format.group_size, packed.scales_zeros)


@cache
def _product_of_halves() -> Linear | None:
    """The product of nested codes of 4 bits; None where it cannot be compiled."""
    if not int4_available() or compiled_operations() is None:
        return None
    from vllm_dymoe.kernels import halves

    halves.compile_everything()
    return halves.product


class _Unfolding:
    """Some blocks of a format of 2 bits, or of upper halves, on their way to 4 bits: views prepared once.

    Args:
        format: 2 bits, or upper halves of 4.
        blocks: which.
        workspace: uint8, at least _block_bytes(format) for each of them.
    """

    def __init__(self, format: MatrixFormat, blocks: slice, workspace: Tensor) -> None:
        self._group_size = format.group_size
        self._parts = _part(blocks, format.padded_columns // format.fold, format)
        self._rows = _part(blocks, BLOCK_ROWS, format)
        self._words = _part(blocks, 2 * BLOCK_ROWS, format)
        rows = (blocks.stop - blocks.start) * BLOCK_ROWS
        scales, pairs = _split(workspace, format.groups * rows * 4, rows * format.padded_columns // 2)
        self._scales_zeros = scales.view(format.dtype).view(format.groups, rows, 2)
        self._scales_zeros_rows = self._scales_zeros.view(format.groups, -1)
        self._unfolds = format.bits == 2
        if self._unfolds:
            self._weight = pairs.view(rows, -1)
            self._halves = pairs.view(-1, 2, format.fold // 2 * PAIR_BYTES).unbind(1)
        self._factors = _alternating(format.code.step * (SCALE_FACTOR if self._unfolds else 1), 1, rows)
        self._halfway = _alternating(0, (format.code.step - 1) / 2, rows) if format.code.upper_of else None

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x [n, padded_columns] times these blocks: [n, rows]."""
        whole = self._parts is None
        if self._unfolds:
            unfold_groups(packed.folded if whole else packed.folded[self._parts], *self._halves)
            weight = self._weight
        else:
            weight = packed.byte_rows if whole else packed.byte_rows[self._rows]
        scales_zeros = packed.scales_zeros_rows if whole else packed.scales_zeros_rows[:, self._words]
        torch.mul(scales_zeros, self._factors, out=self._scales_zeros_rows)
        if self._halfway is not None:
            self._scales_zeros_rows.addcmul_(_scale_twice(scales_zeros), self._halfway)
        return _int4_linear(x, weight, self._group_size, self._scales_zeros)


class _Merging:
    """Some blocks of a nested 4-bit format on their way to one section: views prepared once.

    Args:
        format: 4 bits, nested.
        blocks: which.
        workspace: uint8, at least _block_bytes(format) for each of them.
    """

    def __init__(self, format: MatrixFormat, blocks: slice, workspace: Tensor) -> None:
        self._group_size = format.group_size
        self._parts = _part(blocks, format.padded_columns // format.fold, format)
        self._rows = _part(blocks, BLOCK_ROWS, format)
        rows = (blocks.stop - blocks.start) * BLOCK_ROWS
        self._weight = workspace[: rows * format.padded_columns // 2].view(rows, -1)
        self._halves = self._weight.view(-1, 2, format.fold // 2 * PAIR_BYTES).unbind(1)

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x [n, padded_columns] times these blocks: [n, rows]."""
        assert packed.fine is not None
        assert packed.scales_zeros is not None
        base, fine, scales_zeros = packed.folded, packed.fine.view(packed.folded.shape), packed.scales_zeros
        if self._parts is not None:
            base, fine, scales_zeros = base[self._parts], fine[self._parts], scales_zeros[:, self._rows].contiguous()
        unfold_groups(base, *self._halves)
        add_lower_halves(fine, *self._halves)
        return _int4_linear(x, self._weight, self._group_size, scales_zeros)


class _Planes:
    """Some blocks of an 8-bit format as 4-bit blocks of twice the columns: views prepared once.

    Args:
        format: 8 bits.
        blocks: which.
        workspace: uint8, at least _block_bytes(format) for each of them.
    """

    def __init__(self, format: MatrixFormat, blocks: slice, workspace: Tensor) -> None:
        self._group_size, self._blocks = format.group_size, blocks
        self._rows = _part(blocks, BLOCK_ROWS, format)
        self._words = _part(blocks, 2 * BLOCK_ROWS, format)
        rows = (blocks.stop - blocks.start) * BLOCK_ROWS
        plane_bytes = format.groups * rows * 4
        planes, rest = _split(workspace, 2 * plane_bytes, len(workspace) - 2 * plane_bytes)
        self._scales_zeros = planes.view(format.dtype).view(2 * format.groups, rows, 2)
        self._high, self._low = self._scales_zeros.view(2, format.groups, -1).unbind(0)
        self._high_factors = _alternating(16, 1, rows)
        self._low_factors = _alternating(1, 8, rows)
        if format.nested:
            both = rest[: rows * format.padded_columns]
            self._weight = both.view(rows, -1)
            self._above, self._below = both.view(-1, 2, format.padded_columns, PAIR_BYTES).unbind(1)

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x beside itself [n, 2 * padded_columns] times these blocks: [n, rows]."""
        whole = self._rows is None
        if packed.fine is not None:
            self._above.copy_(packed.weight[self._blocks])
            self._below.copy_(packed.fine[self._blocks])
            weight = self._weight
        else:
            weight = packed.byte_rows if whole else packed.byte_rows[self._rows]
        scales_zeros = packed.scales_zeros_rows if whole else packed.scales_zeros_rows[:, self._words]
        torch.mul(scales_zeros, self._high_factors, out=self._high)
        torch.mul(_scale_twice(scales_zeros), self._low_factors, out=self._low)
        return _int4_linear(x, weight, self._group_size, self._scales_zeros)


def _scale_twice(scales_zeros: Tensor) -> Tensor:
    """The scale in place of the zero, too: a new tensor."""
    # (scale, zero) is one 32-bit word on a little-endian CPU: this puts the scale in both halves.
    words = torch.bitwise_and(scales_zeros.view(torch.int32), _LOW_WORD)
    return words.mul_(_IN_BOTH_WORDS).view(scales_zeros.dtype)


def _plan(format: MatrixFormat, workspace: Tensor) -> Sequence[Linear]:
    """As many blocks at a time as the workspace holds."""
    step = workspace.numel() // _block_bytes(format)
    parts = [slice(start, min(start + step, format.blocks)) for start in range(0, format.blocks, step)]
    if format.bits == 8:
        return [_Planes(format, blocks, workspace) for blocks in parts]
    if format.nested:
        return [_Merging(format, blocks, workspace) for blocks in parts]
    return [_Unfolding(format, blocks, workspace) for blocks in parts]


def _block_bytes(format: MatrixFormat) -> int:
    """Workspace that one block needs."""
    scales_bytes = format.groups * BLOCK_ROWS * 2 * format.dtype.itemsize
    if format.bits == 8:
        return 2 * scales_bytes + (2 * format.padded_columns * PAIR_BYTES if format.nested else 0)
    return scales_bytes + format.padded_columns * PAIR_BYTES


def _part(blocks: slice, per_block: int, format: MatrixFormat) -> slice | None:
    """What belongs to some blocks; None if that is everything, which need not be sliced."""
    if blocks == slice(0, format.blocks):
        return None
    return slice(blocks.start * per_block, blocks.stop * per_block)


def _split(workspace: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    return workspace[:first], workspace[first : first + second]


def _alternating(scale: float, zero: float, rows: int) -> Tensor:
    """scale, zero, scale, zero, ... for some rows: a product with it is three times as fast as with two numbers."""
    return torch.tensor([scale, zero], dtype=torch.bfloat16).repeat(rows)
