"""A linear layer that dequantizes tile by tile: plain torch, any device, bounded scratch.

Each tile of weights is dequantized once, to float32, and multiplied with all the
tokens, so that they share the cost. Nothing of a matrix's size is ever
allocated. Rows of the result may differ in their last bit between batch sizes,
because the library behind `mm` chooses its blocking by them; they never depend
on where the weights lie.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.packed import BLOCK_ROWS, PAIR_BYTES, MatrixFormat, PackedMatrix
from vllm_dymoe.kernels.unfold import SCALE_FACTOR, unfold

# Columns of a tile: enough for a matrix product at full speed, a multiple of
# every group size, and a fixed number, so that the order of summation depends
# on the format alone.
_COLUMNS = 1024

# A float and two half-bytes: the codes before they become floats, and the 4-bit
# codes that 2 bits unfold to.
_BYTES_PER_WEIGHT = 4 + 1

MINIMUM_WORKSPACE_BYTES = _COLUMNS * BLOCK_ROWS * _BYTES_PER_WEIGHT
"""One tile of one block of 64 rows."""


class TiledLinear:
    """x @ weight.T for a packed weight, through a fixed workspace.

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

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x [n, columns] times the weight: [n, rows], in x's dtype, accumulated in float32."""
        format = packed.format
        precise = x.float()
        if format.padded_columns != format.columns:
            precise = F.pad(precise, (0, format.padded_columns - format.columns))
        dequantize = self._quantized_tile if format.quantized else self._plain_tile
        sums = precise.new_empty(x.shape[0], format.padded_rows)
        for rows, columns in self._tiles(format):
            tile = dequantize(packed, rows, columns)
            if columns.start == 0:
                torch.mm(precise[:, columns], tile, out=sums[:, rows])
            else:
                sums[:, rows].addmm_(precise[:, columns], tile)
        return sums[:, : format.rows].to(x.dtype)

    def _tiles(self, format: MatrixFormat) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each tile; the columns of a row in ascending order."""
        height = self._tile_blocks * BLOCK_ROWS
        for row in range(0, format.padded_rows, height):
            rows = slice(row, min(row + height, format.padded_rows))
            for column in range(0, format.padded_columns, _COLUMNS):
                yield rows, slice(column, min(column + _COLUMNS, format.padded_columns))

    def _plain_tile(self, packed: PackedMatrix, rows: slice, columns: slice) -> Tensor:
        """16-bit weights: float32 [columns, rows]."""
        source = packed.weight[rows, columns]
        return self._floats[: source.numel()].view(source.shape).copy_(source).t()

    def _quantized_tile(self, packed: PackedMatrix, rows: slice, columns: slice) -> Tensor:
        """Dequantized weights: float32 [columns, rows]."""
        format = packed.format
        height, width = rows.stop - rows.start, columns.stop - columns.start
        blocks = slice(rows.start // BLOCK_ROWS, rows.stop // BLOCK_ROWS)
        tile = self._floats[: height * width].view(width, height)
        low, high = tile.view(width, height // BLOCK_ROWS, 2, PAIR_BYTES).permute(2, 1, 0, 3)  # [blocks, columns, 32]
        codes = self._codes[: low.numel()].view(low.shape)
        if format.bits == 8:
            above, below = packed.weight[blocks, :, columns].unbind(1)
            scratch = self._pairs[: low.numel()].view(low.shape)
            torch.bitwise_left_shift(above, 4, out=codes)
            low.copy_(codes.bitwise_or_(torch.bitwise_and(below, 0x0F, out=scratch)))
            torch.bitwise_and(above, 0xF0, out=codes)
            high.copy_(codes.bitwise_or_(torch.bitwise_right_shift(below, 4, out=scratch)))
        else:
            pairs = packed.weight[blocks, columns] if format.bits == 4 else unfold(packed, blocks, columns, self._pairs)
            low.copy_(torch.bitwise_and(pairs, 0x0F, out=codes))
            high.copy_(torch.bitwise_right_shift(pairs, 4, out=codes))

        assert packed.scales_zeros is not None
        groups = slice(columns.start // format.group_size, columns.stop // format.group_size)
        scales, zeros = packed.scales_zeros[groups, rows].float().unbind(2)
        scales = scales * (SCALE_FACTOR if format.bits == 2 else 1.0)
        zeros = zeros - (128 if format.bits == 8 else 8) * scales
        grouped = tile.view(-1, format.group_size, height)
        torch.addcmul(zeros.unsqueeze(1), grouped, scales.unsqueeze(1), out=grouped)
        return tile
