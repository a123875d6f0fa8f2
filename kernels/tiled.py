"""A linear layer that dequantizes tile by tile: plain torch, any device, bounded scratch.

Each tile of weights is dequantized once, to float32, and multiplied with all the
tokens, so that they share the cost. Nothing of a matrix's size is ever
allocated. Rows of the result may differ in their last bit between batch sizes,
because the library behind `mm` chooses its blocking by them; they never depend
on where the weights lie.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.unfold import SCALE_FACTOR, unfold
from vllm_dymoe.residency.code import E2M1_OF_E4M3
from vllm_dymoe.residency.matrix import BLOCK_ROWS, PAIR_BYTES, MatrixFormat, PackedMatrix

# Columns of a tile: enough for a matrix product at full speed, a multiple of
# every group size, and a fixed number, so that the order of summation depends
# on the format alone.
_COLUMNS = 1024

# A float and two half-bytes: the codes before they become floats, and the 4-bit
# codes that 2 bits unfold to.
_BYTES_PER_WEIGHT = 4 + 1

MINIMUM_WORKSPACE_BYTES = _COLUMNS * BLOCK_ROWS * _BYTES_PER_WEIGHT
"""One tile of one block of 64 rows."""

# As tensors: a Python number costs another five microseconds in each operation.
_LOW_HALF = torch.tensor(0x0F, dtype=torch.uint8)
_HIGH_HALF = torch.tensor(0xF0, dtype=torch.uint8)
_FOUR = torch.tensor(4, dtype=torch.uint8)
_TWO = torch.tensor(2, dtype=torch.uint8)
_SIGN = torch.tensor(0x80, dtype=torch.uint8)
_MAGNITUDE = torch.tensor(0x1C, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class _Tile:
    """One part of a matrix and the views of the workspace it passes through.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
        blocks: of 64 rows, the same as rows.
        groups: the same as columns.
        floats: float32 [columns, rows], the transposed weights.
        grouped: the same as [groups, group_size, rows].
        low: float32 [part, columns, 32] for each part of the blocks: the weights of their first 32 rows in floats.
        high: the same for their last 32 rows.
        codes: uint8 [blocks, columns, 32].
        parts: codes of each part of the blocks.
        pairs: uint8 like codes.
    """

    rows: slice
    columns: slice
    blocks: slice
    groups: slice
    floats: Tensor
    grouped: Tensor
    low: tuple[Tensor, ...]
    high: tuple[Tensor, ...]
    codes: Tensor
    parts: tuple[Tensor, ...]
    pairs: Tensor

    def store(self, floats: tuple[Tensor, ...], dtype: torch.dtype = torch.uint8) -> None:
        """Codes, numbers of some dtype of a byte, as floats, to low or high."""
        for source, destination in zip(self.parts, floats, strict=True):
            destination.copy_(source.view(dtype))


class TiledLinear:
    """x @ weight.T + bias for a packed weight, through a fixed workspace.

    Args:
        workspace: uint8, on the device where the matrices are; it bounds the tile. Its contents are overwritten.

    Raises:
        ValueError: a workspace that does not hold the smallest tile.
    """

    def __init__(self, workspace: Tensor) -> None:
        self._tile_blocks = workspace.numel() // MINIMUM_WORKSPACE_BYTES
        if self._tile_blocks < 1:
            raise ValueError(f"workspace has {workspace.numel()} bytes, expected at least {MINIMUM_WORKSPACE_BYTES}")
        weights = self._tile_blocks * BLOCK_ROWS * _COLUMNS
        self._floats = workspace[: 4 * weights].view(torch.float32)
        self._codes, self._pairs = workspace[4 * weights : 5 * weights].chunk(2)
        self._tilings: dict[MatrixFormat, list[_Tile]] = {}

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x [n, columns] times the weight, plus the bias: [n, rows], in x's dtype, accumulated in float32."""
        format = packed.format
        precise = packed.in_stored_order(x).float()
        sums = precise.new_empty(x.shape[0], format.padded_rows)
        if format.quantized:
            if format.padded_columns != format.columns:
                precise = F.pad(precise, (0, format.padded_columns - format.columns))
            if packed.scales is None:
                self._add_quantized(precise, packed, sums)
            else:
                self._add_floats(precise, packed, packed.scales, sums)
        else:
            self._add_plain(precise, packed, sums)
        result = sums[:, : format.rows]
        if packed.bias is not None:
            result += packed.bias
        return result.to(x.dtype)

    def _add_plain(self, x: Tensor, packed: PackedMatrix, sums: Tensor) -> None:
        """16 bits: rows [rows, columns] of the weight become float32 a few at a time."""
        rows, columns = packed.weight.shape
        height = self._tile_blocks * BLOCK_ROWS
        for row in range(0, rows, height):
            for column in range(0, columns, _COLUMNS):
                source = packed.weight[row : row + height, column : column + _COLUMNS]
                tile = self._floats[: source.numel()].view(source.shape).copy_(source).t()
                _multiply(x[:, column : column + _COLUMNS], tile, sums[:, row : row + height], first=column == 0)

    def _add_quantized(self, x: Tensor, packed: PackedMatrix, sums: Tensor) -> None:
        assert packed.scales_zeros is not None
        format, whole_bytes = packed.format, packed.format.bits == 8
        for tile in self._tiling(packed.format):
            if tile.columns.start == 0:
                # Separate and contiguous: with strides the use below takes five times as long.
                scales, zeros = (part.float() for part in packed.scales_zeros[:, tile.rows].unbind(2))
                if format.integer_zeros:
                    zeros.mul_(scales)
                zeros = zeros.sub_(scales, alpha=format.code.center).unsqueeze(1)
                if format.bits == 2:
                    scales.mul_(format.code.step * SCALE_FACTOR)
                elif format.code.upper_of:
                    scales.mul_(format.code.step)
                scales = scales.unsqueeze(1)
            if whole_bytes:
                _load_bytes(tile, packed)
            else:
                _load_pairs(tile, packed)
            torch.addcmul(zeros[tile.groups], tile.grouped, scales[tile.groups], out=tile.grouped)
            _multiply(x[:, tile.columns], tile.floats, sums[:, tile.rows], first=tile.columns.start == 0)

    def _add_floats(self, x: Tensor, packed: PackedMatrix, scales: Tensor, sums: Tensor) -> None:
        """Codes with a codebook: level times scale is exact at 4 bits, where the factor follows behind the sum."""
        four_bits = packed.format.bits == 4
        for tile in self._tiling(packed.format):
            if tile.columns.start == 0:
                some = scales[tile.blocks].float().transpose(0, 1).reshape(packed.format.groups, 1, -1)
                if four_bits:
                    some *= E2M1_OF_E4M3
            _load_floats(tile, packed) if four_bits else _load_bytes(tile, packed, torch.float8_e4m3fn)
            tile.grouped.mul_(some[tile.groups])
            _multiply(x[:, tile.columns], tile.floats, sums[:, tile.rows], first=tile.columns.start == 0)
        if packed.factor is not None:
            sums *= packed.factor[0] / packed.factor[1]

    def _tiling(self, format: MatrixFormat) -> list[_Tile]:
        """The tiles of a format, prepared once; those of the same rows in ascending columns."""
        if format not in self._tilings:
            height = self._tile_blocks * BLOCK_ROWS
            self._tilings[format] = [
                self._tile(
                    format,
                    slice(row, min(row + height, format.padded_rows)),
                    slice(column, min(column + _COLUMNS, format.padded_columns)),
                )
                for row in range(0, format.padded_rows, height)
                for column in range(0, format.padded_columns, _COLUMNS)
            ]
        return self._tilings[format]

    def _tile(self, format: MatrixFormat, rows: slice, columns: slice) -> _Tile:
        height, width = rows.stop - rows.start, columns.stop - columns.start
        blocks = slice(rows.start // BLOCK_ROWS, rows.stop // BLOCK_ROWS)
        floats = self._floats[: height * width].view(width, height)
        low, high = floats.view(width, height // BLOCK_ROWS, 2, PAIR_BYTES).permute(2, 1, 0, 3)
        codes = self._codes[: low.numel()].view(low.shape)
        # On a CPU block by block takes half the time of one strided copy; on a GPU launches count.
        parts = len(low) if codes.device.type == "cpu" else 1
        return _Tile(
            rows=rows,
            columns=columns,
            blocks=blocks,
            groups=slice(columns.start // format.group_size, columns.stop // format.group_size),
            floats=floats,
            grouped=floats.view(-1, format.group_size, height),
            low=low.chunk(parts),
            high=high.chunk(parts),
            codes=codes,
            parts=codes.chunk(parts),
            pairs=self._pairs[: low.numel()].view(low.shape),
        )


def _load_pairs(tile: _Tile, packed: PackedMatrix) -> None:
    """4-bit codes of a tile as floats; 2-bit codes are unfolded to them, and halves put together."""
    if packed.format.code.stored_bits == 2:
        pairs = unfold(packed, tile.blocks, tile.columns, tile.pairs.view(-1))
    else:
        pairs = packed.weight[tile.blocks, tile.columns]
    torch.bitwise_and(pairs, _LOW_HALF, out=tile.codes)
    tile.store(tile.low)
    torch.bitwise_right_shift(pairs, _FOUR, out=tile.codes)
    tile.store(tile.high)


def _load_bytes(tile: _Tile, packed: PackedMatrix, dtype: torch.dtype = torch.uint8) -> None:
    """8-bit codes of a tile, numbers of some dtype, as floats."""
    if packed.fine is None:
        above, below = packed.weight[tile.blocks, :, tile.columns].unbind(1)
    else:
        above, below = packed.weight[tile.blocks, tile.columns], packed.fine[tile.blocks, tile.columns]
    torch.bitwise_left_shift(above, _FOUR, out=tile.codes)
    tile.codes.bitwise_or_(torch.bitwise_and(below, _LOW_HALF, out=tile.pairs))
    tile.store(tile.low, dtype)
    torch.bitwise_and(above, _HIGH_HALF, out=tile.codes)
    tile.codes.bitwise_or_(torch.bitwise_right_shift(below, _FOUR, out=tile.pairs))
    tile.store(tile.high, dtype)


def _load_floats(tile: _Tile, packed: PackedMatrix) -> None:
    """e2m1 codes of a tile as floats, each a 64th of what it stands for: see codebook.as_e4m3."""
    pairs = packed.weight[tile.blocks, tile.columns]
    torch.bitwise_left_shift(pairs, _TWO, out=tile.codes)
    tile.codes.bitwise_and_(_MAGNITUDE)
    torch.bitwise_left_shift(pairs, _FOUR, out=tile.pairs)
    tile.codes.bitwise_or_(tile.pairs.bitwise_and_(_SIGN))
    tile.store(tile.low, torch.float8_e4m3fn)
    torch.bitwise_right_shift(pairs, _TWO, out=tile.codes)
    tile.codes.bitwise_and_(_MAGNITUDE)
    tile.codes.bitwise_or_(torch.bitwise_and(pairs, _SIGN, out=tile.pairs))
    tile.store(tile.high, torch.float8_e4m3fn)


def _multiply(x: Tensor, tile: Tensor, sums: Tensor, *, first: bool) -> None:
    """sums [n, rows] = or += x [n, columns] @ tile [columns, rows]."""
    if first:
        torch.mm(x, tile, out=sums)
    else:
        sums.addmm_(x, tile)
