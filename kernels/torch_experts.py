"""Experts in plain torch, for installations without the native library.

A few rows are dequantized at a time. The last bit of a row may depend on the number of tokens, because torch chooses
its blocking by it. It never depends on where the weights are.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.experts.matrix import BLOCK_ROWS, PackedMatrix
from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import check_formats
from vllm_dymoe.kernels.pack import dequantize

_WEIGHTS_AT_ONCE = 1 << 18


def compute_with_torch(
    x: Tensor,
    work: Sequence[tuple[PackedExpert, Tensor, Tensor]],
    out: Tensor,
    activation: Activation,
) -> None:
    """Implement :meth:`CpuKernel.compute` expert by expert.

    Args:
        work: experts, each with its rows of x and of out, int64 [n].
    """
    for expert, rows, pairs in work:
        check_formats(expert.gate.format, expert.up.format, expert.down.format, x, activation)
        out.index_copy_(0, pairs, compute_expert(x.index_select(0, rows), expert, activation))


def compute_expert(x: Tensor, expert: PackedExpert, activation: Activation) -> Tensor:
    """Compute one expert, down(activation(gate x, up x)), for x [n, hidden].

    Returns:
        a new tensor like x.
    """
    gates = linear(x, expert.gate) if activation.has_gate else None
    ups = linear(x, expert.up)
    hidden = activation.alone(ups) if gates is None else activation.gated(gates, ups)
    return linear(hidden, expert.down)


def expert_reference(
    x: Tensor,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    activation: Activation,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute one expert in `dtype`.

    This is the reference that every kernel is tested against.
    """
    return compute_expert(x.to(dtype), PackedExpert(gate, up, down), activation)


def linear(x: Tensor, packed: PackedMatrix) -> Tensor:
    """Multiply x [n, columns] with a packed matrix and add the bias: [n, rows].

    Sums are float32 (float64 for float64 x).
    """
    rows, precise = packed.format.rows, x if x.dtype == torch.float64 else x.float()
    step = max(_WEIGHTS_AT_ONCE // packed.format.padded_columns // BLOCK_ROWS, 1) * BLOCK_ROWS
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    result = torch.cat([F.linear(precise, dequantize(_rows_of(packed, part), precise.dtype)) for part in parts], 1)
    if packed.bias is not None:
        result += packed.bias
    return result.to(x.dtype)


def _rows_of(packed: PackedMatrix, rows: slice) -> PackedMatrix:
    """Return some rows of a matrix without their bias; the first one begins a block."""
    blocks = slice(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS))
    weight, scales_zeros, scales, residual = packed.weight, packed.scales_zeros, packed.scales, packed.residual
    return replace(
        packed,
        format=replace(packed.format, rows=rows.stop - rows.start, bias=False),
        weight=weight[blocks if packed.format.quantized else rows],
        scales_zeros=None if scales_zeros is None else scales_zeros[:, blocks.start * BLOCK_ROWS : rows.stop],
        bias=None,
        scales=None if scales is None else scales[blocks],
        residual=None if residual is None else residual[blocks],
    )
