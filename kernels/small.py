"""Small experts on a CPU: a whole layer's in one compiled call.

An operation of torch costs 5 to 50 microseconds before it computes anything (a 16-bit product of oneDNN 40, one of the
int4 kernel 8), and a matrix of 256 x 64 takes 3. What is here does gate, up, activation, down and the weighted sum of
any number of such experts, at any mix of bit-widths, in one call that numba compiles; vLLM needs numba, too. One thread
computes: nothing here is long enough for two.

A token's result depends on its expert's bytes and on nothing else: every sum goes over the same columns in the same
order, whatever else is in the call and wherever it lies.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.base import ExpertWork, Receive
from vllm_dymoe.kernels.packed import MatrixFormat

_ALL = 7
_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2, Activation.SWIGLU_OAI: 3}
_GELU, _GELU_TANH, _OAI = 1, 2, 3

# What a row of the table holds; behind that the addresses of weight, scales, bias and order for gate, up and down, 0
# for those that a matrix has not.
_COUNT, _TOKENS, _PAIRS, _INTERMEDIATE, _BITS, _GROUP_SIZE, _STEPS, _MATRICES = range(8)
_ROW = _MATRICES + 12

# Medians of one thread with AVX512 and AMX, matrices of 256 x 64, microseconds for each: oneDNN takes 40 up to 16
# tokens, and this 3 for one and 1.5 more for each further one.
_PLAIN_PRODUCTS = 1 << 18
_QUANTIZED_WEIGHTS = 1 << 16


def most_tokens(gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, quantized: int) -> int:
    """Most tokens of one expert with which it is small enough to be computed here; 0 for one that is not.

    Args:
        gate: of the expert, like the others.
        up: its format.
        down: its format.
        quantized: most tokens of the path that few tokens of its quantized matrices would take otherwise.
    """
    if gate.dtype is not torch.bfloat16 or gate != up or (down.bits, down.group_size) != (gate.bits, gate.group_size):
        return 0
    if down.integer_zeros != gate.integer_zeros:
        return 0
    weights = gate.rows * gate.columns
    if gate.bits == 16:
        return _PLAIN_PRODUCTS // weights
    return quantized if weights <= _QUANTIZED_WEIGHTS else 0


def forward(
    x: Tensor, work: Sequence[ExpertWork], out: Tensor, activation: Activation, receive: Receive | None = None
) -> None:
    """ExpertKernel.forward for small experts, each with at least one token.

    Raises:
        IndexError: a token that x has not, or a pair that out has not.
    """
    table, most, inner = array("q"), 0, 0
    named: list[Tensor] = []
    for gate, up, down, tokens, pairs in work:
        format, count = gate.format, len(tokens)
        named += (
            (tokens := tokens.contiguous()),
            (pairs := pairs.contiguous()),
        )  # which have to live as long as the call
        numbers = count, tokens.data_ptr(), pairs.data_ptr(), format.rows, format.bits, format.group_size
        table.extend((*numbers, format.integer_zeros, *gate.addresses, *up.addresses, *down.addresses))
        most, inner = max(most, count), inner + 2 * count * format.rows
    scratch = torch.empty(inner + most * x.shape[1])
    begin = scratch.data_ptr()
    arguments = (
        *(table.buffer_info()[0], len(work), x.data_ptr(), *x.shape, begin, begin + 4 * inner),
        *(_ACTIVATIONS[activation], out.data_ptr(), len(out)),
    )
    if receive is None:
        known = _experts(*arguments, _ALL)
    else:
        for projection in range(3):
            receive(projection + 1)
            known = _experts(*arguments, 1 << projection)
    if not known:
        raise IndexError(f"work names a token or a pair that is not there: x has {len(x)} rows, out has {len(out)}")


def combine(out: Tensor, weights: Tensor, into: Tensor) -> None:
    """kernels.combine, bit for bit, where every pair counts: bfloat16 and contiguous, all three."""
    tokens, top_k = weights.shape
    _combine(out.data_ptr(), weights.data_ptr(), tokens, top_k, out.shape[1], into.data_ptr())


def _compiled(function: Callable[..., Any], fastmath: set[str]) -> Any:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep what it compiles
        return njit(**options)(function)


def _in_order(function: Callable[..., Any]) -> Any:
    """Sums in the order that is written; a product and a sum may share a rounding."""
    return _compiled(function, {"contract"})


def _as_written(function: Callable[..., Any]) -> Any:
    return _compiled(function, set())


def _in_lanes(function: Callable[..., Any]) -> Any:
    """Sums in the order that suits the machine's vectors, the same in each call."""
    return _compiled(function, {"contract", "reassoc", "nsz"})


@intrinsic
def _pointer(context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_in_order
def _widened(source, target):  # type: ignore[no-untyped-def]
    """bfloat16 to float32, both as their bits."""
    for i in range(target.size):
        target[i] = np.uint32(source[i]) << np.uint32(16)


@_in_order
def _narrowed(source, target):  # type: ignore[no-untyped-def]
    """float32 to bfloat16, both as their bits, ties to even."""
    for i in range(target.size):
        bits = source[i]
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        target[i] = np.uint16(0x7FC0 if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else rounded)


@_in_lanes
def _times_four_rows(rows, x, token):  # type: ignore[no-untyped-def]
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(x.shape[1]):
        value = x[token, i]
        a += rows[0, i] * value
        b += rows[1, i] * value
        c += rows[2, i] * value
        d += rows[3, i] * value
    return a, b, c, d


@_in_order
def _plain(x, rows, columns, weight_at, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns] times a 16-bit weight [rows, columns]."""
    weight = carray(_pointer(weight_at), (rows, columns), np.uint16)
    bits = np.zeros((4, columns), np.uint32)
    floats = bits.view(np.float32)
    for row in range(0, rows, 4):
        valid = min(4, rows - row)
        for r in range(valid):
            for i in range(columns):
                bits[r, i] = np.uint32(weight[row + r, i]) << np.uint32(16)
        for token in range(len(x)):
            four = _times_four_rows(floats, x, token)
            for r in range(valid):
                out[token, row + r] = four[r]


@_in_order
def _unpack_pairs(packed, first, lines, scales, zeros, tile):  # type: ignore[no-untyped-def]
    """Columns of a block, 32 bytes each to 64 weights: of 4 bits, or of 2, which lie above one another in halves."""
    whole = lines == len(tile)
    mask = np.uint8(15 if whole else 3)
    for c in range(len(tile)):
        line, shift = (c, np.uint8(0)) if c < lines else (c - lines, np.uint8(2))
        above = shift + np.uint8(4)
        for r in range(32):
            pair = packed[first + line, r]
            tile[c, r] = np.float32(np.int32((pair >> shift) & mask)) * scales[r] + zeros[r]
            tile[c, r + 32] = np.float32(np.int32((pair >> above) & mask)) * scales[r + 32] + zeros[r + 32]


@_in_order
def _unpack_planes(packed, first, second, scales, zeros, tile):  # type: ignore[no-untyped-def]
    """The same of 8-bit codes, whose halves lie apart."""
    nibble, high, four = np.uint8(15), np.uint8(240), np.uint8(4)
    for c in range(len(tile)):
        for r in range(32):
            above, below = packed[first + c, r], packed[second + c, r]
            low = np.int32((above & nibble) << four | below & nibble)
            tile[c, r] = np.float32(low) * scales[r] + zeros[r]
            tile[c, r + 32] = np.float32(np.int32(above & high | below >> four)) * scales[r + 32] + zeros[r + 32]


@_in_order
def _multiply(x, start, width, tile, sums):  # type: ignore[no-untyped-def]
    """sums [n, 64] += x [n, start:start + width] times tile [width, 64]; of tile whole fours are read."""
    for token in range(len(x)):
        for c in range(0, width, 4):
            x0 = x[token, start + c]
            x1 = x[token, start + c + 1] if c + 1 < width else np.float32(0)
            x2 = x[token, start + c + 2] if c + 2 < width else np.float32(0)
            x3 = x[token, start + c + 3] if c + 3 < width else np.float32(0)
            for r in range(64):
                total = sums[token, r] + x0 * tile[c, r]
                total += x1 * tile[c + 1, r]
                total += x2 * tile[c + 2, r]
                total += x3 * tile[c + 3, r]
                sums[token, r] = total


@_in_order
def _quantized(x, rows, columns, bits, group_size, in_steps, weight_at, scales_at, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns] times a weight of 8, 4 or 2 bits: a block's group at a time, as float32."""
    blocks, groups = (rows + 63) // 64, (columns + group_size - 1) // group_size
    packed = carray(_pointer(weight_at), (blocks * groups * group_size * bits // 4, 32), np.uint8)
    scales_zeros = carray(_pointer(scales_at), (groups, blocks * 64, 2), np.uint16)
    tile, sums = np.empty((group_size, 64), np.float32), np.empty((len(x), 64), np.float32)
    scales, zeros = np.empty(64, np.float32), np.empty(64, np.float32)
    scale_bits, zero_bits = scales.view(np.uint32), zeros.view(np.uint32)
    midpoint = np.float32(1 << (bits - 1))
    for block in range(blocks):
        for token in range(len(x)):
            for r in range(64):
                sums[token, r] = 0
        for group in range(groups):
            for r in range(64):
                scale_bits[r] = np.uint32(scales_zeros[group, block * 64 + r, 0]) << np.uint32(16)
                zero_bits[r] = np.uint32(scales_zeros[group, block * 64 + r, 1]) << np.uint32(16)
            for r in range(64):
                zero = zeros[r] * scales[r] if in_steps else zeros[r]
                zeros[r] = zero - midpoint * scales[r]
            start = group * group_size
            width = min(group_size, columns - start)
            if bits == 8:
                first = block * 2 * groups * group_size + start
                _unpack_planes(packed, first, first + groups * group_size, scales, zeros, tile)
            else:
                lines = group_size * bits // 4
                _unpack_pairs(packed, (block * groups + group) * lines, lines, scales, zeros, tile)
            _multiply(x, start, width, tile, sums)
        for token in range(len(x)):
            for r in range(min(64, rows - block * 64)):
                out[token, block * 64 + r] = sums[token, r]


@_in_order
def _linear(x, row, matrix, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns] times one matrix of an expert, plus its bias."""
    count, columns, rows = x.shape[0], x.shape[1], out.shape[1]
    first = _MATRICES + 4 * matrix
    weight_at, scales_at, bias_at, order_at = row[first], row[first + 1], row[first + 2], row[first + 3]
    if order_at != 0:
        order = carray(_pointer(order_at), columns, np.uint16)
        stored = np.empty((count, columns), np.float32)
        for token in range(count):
            for c in range(columns):
                stored[token, c] = x[token, order[c]]
        x = stored
    if row[_BITS] == 16:
        _plain(x, rows, columns, weight_at, out)
    else:
        _quantized(x, rows, columns, row[_BITS], row[_GROUP_SIZE], row[_STEPS] != 0, weight_at, scales_at, out)
    if bias_at != 0:
        bits = np.empty(rows, np.uint32)
        _widened(carray(_pointer(bias_at), rows, np.uint16), bits)
        bias = bits.view(np.float32)
        for token in range(count):
            for r in range(rows):
                out[token, r] += bias[r]


@_in_order
def _gate(gates, ups, activation):  # type: ignore[no-untyped-def]
    """gates = activation(gates) * ups, in float32."""
    one, half = np.float32(1), np.float32(0.5)
    for i in np.ndindex(gates.shape):
        gate, up = gates[i], ups[i]
        if activation == _GELU:
            gates[i] = half * gate * (one + np.float32(math.erf(gate * np.float32(0.7071067811865476)))) * up
        else:
            slope = np.float32(1)
            if activation == _GELU_TANH:  # (1 + tanh(y)) / 2 is sigmoid(2 y)
                slope = np.float32(1.5957691216057308) * (one + np.float32(0.044715) * gate * gate)
            elif activation == _OAI:
                gate, up = min(gate, np.float32(7)), min(max(up, np.float32(-7)), np.float32(7)) + one
                slope = np.float32(1.702)
            gates[i] = gate / (one + np.exp(-slope * gate)) * up


@_in_order
def _experts(table_at, number, x_at, tokens, hidden, inner_at, wide_at, activation, out_at, rows, stages):  # type: ignore[no-untyped-def]
    """Some stages of some experts, each at its own bit-width.

    Args:
        table_at: address of int64 [number, _ROW].
        number: of experts.
        x_at: address of bfloat16 [tokens, hidden].
        tokens: of x.
        hidden: width of x and out.
        inner_at: address of float32 [sum over experts of 2 * count * intermediate], kept from stage to stage.
        wide_at: address of float32 [largest count, hidden].
        activation: its number.
        out_at: address of bfloat16 [rows, hidden], written in the stage DOWN where a pair is named.
        rows: of out.
        stages: sum of GATE, UP, DOWN.

    Returns:
        Whether every token and pair that an expert names is one of x and out; if not, nothing is computed.
    """
    table = carray(_pointer(table_at), (number, _ROW), np.int64)
    x = carray(_pointer(x_at), (tokens, hidden), np.uint16)
    out = carray(_pointer(out_at), (rows, hidden), np.uint16)
    for row in table:
        count = row[_COUNT]
        named, pairs = carray(_pointer(row[_TOKENS]), count, np.int64), carray(_pointer(row[_PAIRS]), count, np.int64)
        for i in range(count):
            if named[i] < 0 or named[i] >= tokens or pairs[i] < 0 or pairs[i] >= rows:
                return False
    for row in table:
        count, width = row[_COUNT], row[_INTERMEDIATE]
        named, pairs = carray(_pointer(row[_TOKENS]), count, np.int64), carray(_pointer(row[_PAIRS]), count, np.int64)
        wide = carray(_pointer(wide_at), (count, hidden), np.float32)
        wide_bits = carray(_pointer(wide_at), (count, hidden), np.uint32)
        gate = carray(_pointer(inner_at), (count, width), np.float32)
        up = carray(_pointer(inner_at + 4 * count * width), (count, width), np.float32)
        inner_at += 8 * count * width
        for matrix in range(3):
            if not stages >> matrix & 1:
                continue
            if matrix < 2:
                for i in range(count):
                    _widened(x[named[i]], wide_bits[i])
                inputs, result = wide, up if matrix else gate
            else:
                _gate(gate, up, activation)
                inputs, result = gate, wide
            _linear(inputs, row, matrix, result)
            if matrix == 2:
                for i in range(count):
                    _narrowed(wide_bits[i], out[pairs[i]])
    return True


@_as_written
def _add_weighted(values, weight, sums):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        sums[i] += weight * values[i]


@_as_written
def _combine(out_at, weights_at, tokens, top_k, hidden, into_at):  # type: ignore[no-untyped-def]
    """The weighted sum of kernels.combine, bit for bit, where every pair counts.

    Args:
        out_at: address of bfloat16 [tokens * top_k, hidden].
        weights_at: address of float32 [tokens, top_k].
        tokens: that are summed.
        top_k: experts of each.
        hidden: width of out and into.
        into_at: address of bfloat16 [tokens, hidden].
    """
    weights = carray(_pointer(weights_at), (tokens, top_k), np.float32)
    out = carray(_pointer(out_at), (tokens, top_k, hidden), np.uint16)
    into = carray(_pointer(into_at), (tokens, hidden), np.uint16)
    bits, sums = np.empty(hidden, np.uint32), np.empty(hidden, np.float32)
    for token in range(tokens):
        for i in range(hidden):
            sums[i] = 0
        for k in range(top_k):
            _widened(out[token, k], bits)
            _add_weighted(bits.view(np.float32), weights[token, k], sums)
        _narrowed(sums.view(np.uint32), into[token])
