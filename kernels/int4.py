"""A linear layer on torch's own int4 kernel: few tokens, bfloat16, a CPU with AVX512.

The kernel reads packed bytes where they lie, dequantizes in registers and
accumulates each row in float32 in one order, so a token's result depends neither
on the address of the weights nor on the other tokens of the batch. It computes
(code - 8) * scale + zero on 4-bit codes. A 2-bit matrix unfolds to that; an
8-bit code 16 h + l is two of them, one beside the other:

    (16 h + l - 128) * scale + zero = [(h - 8) * 16 scale + zero] + [(l - 8) * scale + 8 scale]

so a block whose high codes are followed by its low codes is a block of twice the
columns, and x beside itself meets it in one call, with one rounding at the end.
All factors are powers of two: the scales stay exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.packed import BLOCK_ROWS, PAIR_BYTES, MatrixFormat, PackedMatrix
from vllm_dymoe.kernels.unfold import SCALE_FACTOR, unfold

_int4_linear = torch._weight_int4pack_mm_for_cpu


def int4_available() -> bool:
    """Whether this machine's int4 kernel reads our layout; with AVX2 or on ARM it reads another."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


class Int4Linear:
    """x @ weight.T for a packed weight of 8, 4 or 2 bits.

    Args:
        workspace: uint8 on the CPU, for 2-bit codes on their way to 4. Its contents are overwritten.
    """

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace
        self._patterns: dict[tuple[float, float, int], Tensor] = {}

    def supports(self, format: MatrixFormat) -> bool:
        """Whether a format can be computed here: a matter of the format alone."""
        # In float16 torch's kernel is scalar code, a hundred times slower.
        return (
            format.quantized
            and format.dtype is torch.bfloat16
            and (format.bits != 2 or format.padded_columns * PAIR_BYTES <= self._workspace.numel())
        )

    def __call__(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        """x bfloat16 [n, columns] times the weight: bfloat16 [n, rows], accumulated in float32."""
        format = packed.format
        if format.padded_columns != format.columns:
            x = F.pad(x, (0, format.padded_columns - format.columns))
        x = x.contiguous()  # a result without its padding rows is not, and comes back here as input
        if format.bits == 4:
            weight = packed.weight.view(format.padded_rows, -1)
            result = _int4_linear(x, weight, format.group_size, packed.scales_zeros)
        elif format.bits == 8:
            weight = packed.weight.view(format.padded_rows, -1)
            result = _int4_linear(torch.cat((x, x), 1), weight, format.group_size, self._two_planes(packed))
        else:
            result = self._unfolded(x, packed)
        return result if format.padded_rows == format.rows else result[:, : format.rows]

    def _unfolded(self, x: Tensor, packed: PackedMatrix) -> Tensor:
        format = packed.format
        columns = slice(0, format.padded_columns)
        step = self._workspace.numel() // (format.padded_columns * PAIR_BYTES)
        parts = []
        for block in range(0, format.blocks, step):
            blocks = slice(block, min(block + step, format.blocks))
            rows = slice(blocks.start * BLOCK_ROWS, blocks.stop * BLOCK_ROWS)
            weight = unfold(packed, blocks, columns, self._workspace).view(rows.stop - rows.start, -1)
            parts.append(_int4_linear(x, weight, format.group_size, self._scaled(packed, rows, SCALE_FACTOR, 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _two_planes(self, packed: PackedMatrix) -> Tensor:
        """Scales and zeros of an 8-bit matrix as of one with twice the columns: [2 * groups, padded_rows, 2]."""
        format = packed.format
        assert packed.scales_zeros is not None
        planes = packed.scales_zeros.new_empty(2, format.groups, format.padded_rows * 2)
        flat = packed.scales_zeros.view(format.groups, -1)
        torch.mul(flat, self._pattern(16, 1, format.padded_rows), out=planes[0])
        # (scale, zero) is one 32-bit word on a little-endian CPU: this puts the scale in both halves.
        twice = (flat.view(torch.int32) & 0xFFFF).mul_(0x10001).view(format.dtype)
        torch.mul(twice, self._pattern(1, 8, format.padded_rows), out=planes[1])
        return planes.view(2 * format.groups, format.padded_rows, 2)

    def _scaled(self, packed: PackedMatrix, rows: slice, scale: float, zero: float) -> Tensor:
        """Scales and zeros of some rows, multiplied: [groups, rows, 2]."""
        assert packed.scales_zeros is not None
        height = rows.stop - rows.start
        flat = packed.scales_zeros.view(packed.format.groups, -1)[:, 2 * rows.start : 2 * rows.stop]
        return (flat * self._pattern(scale, zero, height)).view(-1, height, 2)

    def _pattern(self, scale: float, zero: float, rows: int) -> Tensor:
        """scale, zero, scale, zero, ... for a number of rows: a product with it runs three times as fast as with two."""
        key = scale, zero, rows
        if key not in self._patterns:
            self._patterns[key] = torch.tensor([scale, zero], dtype=torch.bfloat16).repeat(rows)
        return self._patterns[key]
