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
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from llvmlite.binding import ffi
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.base import ExpertWork, Receive
from vllm_dymoe.residency.matrix import MatrixFormat

# llvmlite answers every name with a function of its library, __dict__ too; vLLM 0.32 on a CPU asks each attribute of
# each module for that, and would not start in a process that has loaded numba.
_function_of_llvm = type(ffi.lib).__getattr__


def _no_magic(library: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _function_of_llvm(library, name)


type(ffi.lib).__getattr__ = _no_magic


_ALL = 7
_CURVES = {curve: number for number, curve in enumerate(Curve)}
_SWIGLU, _SWIGLU_STEP, _SITU, _GELU, _GELU_TANH, _RELU2 = _CURVES.values()

# What a row of the table holds; behind that the addresses of weight, scales, bias, order and the lower halves of codes
# for gate, up and down, 0 for those that a matrix has not.
_COUNT, _TOKENS, _PAIRS, _INTERMEDIATE, _BITS, _UPPER_OF, _FOLD, _GROUP_SIZE, _STEPS, _MATRICES = range(10)
_ADDRESSES = 5
_ROW = _MATRICES + 3 * _ADDRESSES

# Measured with one thread, AVX512 and AMX. At 16 bits a product of oneDNN costs 40 microseconds up to 16 tokens of a
# 256 x 64 matrix, and this 2 for one token and 1 more for each further one. At 4 bits torch's int4 kernel takes 8, and
# this 3; at 512 x 128 it is 1.1 to 1.4 times as fast as this.
_PLAIN_PRODUCTS = 1 << 18
_QUANTIZED_WEIGHTS = 1 << 15

_numbers = attrgetter("code", "group_size", "integer_zeros")


def most_tokens(gate: MatrixFormat, up: MatrixFormat, down: MatrixFormat, quantized: int) -> int:
    """Most tokens of one expert with which it is small enough to be computed here; 0 for one that is not.

    Args:
        gate: of the expert, like the others.
        up: its format.
        down: its format.
        quantized: most tokens of the path that few tokens of its quantized matrices would take otherwise.
    """
    if up.dtype is not torch.bfloat16 or (gate.rows and gate != up):
        return 0
    if _numbers(down) != _numbers(up):
        return 0
    if up.code.floats or down.code.floats:
        return 0
    weights = up.rows * up.columns
    if up.bits == 16:
        return _PLAIN_PRODUCTS // weights
    return quantized if weights <= _QUANTIZED_WEIGHTS else 0


class Call:
    """Small experts that are computed together, described one after the other."""

    def __init__(self) -> None:
        self._table = array("q")
        self._named: list[Tensor] = []  # which have to live as long as their addresses are used
        self._experts = self._most = self._inner = 0

    def add(self, expert: ExpertWork, format: MatrixFormat, count: int) -> None:
        """One with at least one token.

        Args:
            expert: what it is, and where.
            format: of its up projection.
            count: its number of tokens.
        """
        gate, up, down, tokens, pairs = expert
        if not (tokens.is_contiguous() and pairs.is_contiguous()):
            tokens, pairs = tokens.contiguous(), pairs.contiguous()
            self._named += tokens, pairs
        numbers = (
            count,
            tokens.data_ptr(),
            pairs.data_ptr(),
            format.rows,
            format.bits,
            format.code.upper_of,
            format.fold,
        )
        self._table.extend(
            (*numbers, format.group_size, format.integer_zeros, *gate.addresses, *up.addresses, *down.addresses)
        )
        self._experts += 1
        self._inner += 2 * count * format.rows
        self._most = max(self._most, count)

    def run(self, x: Tensor, out: Tensor, activation: Activation, receive: Receive | None = None) -> None:
        """ExpertKernel.forward for them.

        Raises:
            IndexError: a token that x has not, or a pair that out has not.
        """
        rows, hidden = x.shape
        scratch = torch.empty(self._inner + self._most * hidden)
        inner = scratch.data_ptr()
        wide, table = inner + 4 * self._inner, self._table.buffer_info()[0]
        known = True
        for projection in (0,) if receive is None else range(3):
            if receive is not None:
                receive(projection + 1)
            known = _experts(
                table,
                self._experts,
                x.data_ptr(),
                rows,
                hidden,
                inner,
                wide,
                _CURVES[activation.curve],
                (activation.limit, activation.alpha, activation.beta),
                activation.has_gate,
                out.data_ptr(),
                out.shape[0],
                _ALL if receive is None else 1 << projection,
            )
        if not known:
            raise IndexError(f"work names a token or a pair that is not there: x has {rows} rows, out has {len(out)}")


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


@intrinsic
def _float(context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@_in_order
def _wide(half):  # type: ignore[no-untyped-def]
    """A bfloat16's bits to its value."""
    return _float(np.uint32(half) << np.uint32(16))


@_in_lanes
def _times_four_rows(weight, a, b, c, d, x, s, t):  # type: ignore[no-untyped-def]
    """Rows a, b, c, d of a 16-bit weight times tokens s and t."""
    zero = np.float32(0)
    as_, bs, cs, ds, at, bt, ct, dt = zero, zero, zero, zero, zero, zero, zero, zero
    for i in range(x.shape[1]):
        xs, xt = x[s, i], x[t, i]
        wa, wb, wc, wd = _wide(weight[a, i]), _wide(weight[b, i]), _wide(weight[c, i]), _wide(weight[d, i])
        as_ += wa * xs
        bs += wb * xs
        cs += wc * xs
        ds += wd * xs
        at += wa * xt
        bt += wb * xt
        ct += wc * xt
        dt += wd * xt
    return as_, bs, cs, ds, at, bt, ct, dt


@_in_order
def _plain(x, rows, columns, weight_at, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns] times a 16-bit weight [rows, columns]."""
    weight, last = carray(_pointer(weight_at), (rows, columns), np.uint16), rows - 1
    for s in range(0, len(x), 2):
        t = min(s + 1, len(x) - 1)  # the last of an odd number is computed twice, in the same way as all others
        for a in range(0, rows, 4):
            b, c, d = min(a + 1, last), min(a + 2, last), min(a + 3, last)
            out[s, a], out[s, b], out[s, c], out[s, d], out[t, a], out[t, b], out[t, c], out[t, d] = _times_four_rows(
                weight, a, b, c, d, x, s, t
            )


@_in_order
def _unpack_four(packed, scales, zeros, tile):  # type: ignore[no-untyped-def]
    """tile [columns, 64], float32, of a block's columns at 4 bits: [columns, 32] bytes."""
    for c in range(len(tile)):
        for r in range(32):
            pair = packed[c, r]
            tile[c, r] = np.float32(np.int32(pair & np.uint8(15))) * scales[r] + zeros[r]
            tile[c, r + 32] = np.float32(np.int32(pair >> np.uint8(4))) * scales[r + 32] + zeros[r + 32]


@_in_order
def _unpack_two(packed, scales, zeros, tile):  # type: ignore[no-untyped-def]
    """The same of a group at 2 bits: [columns / 2, 32] bytes, half by half, or nothing of it becomes vectors."""
    for c in range(len(packed)):
        for r in range(32):
            pair = packed[c, r]
            tile[c, r] = np.float32(np.int32(pair & np.uint8(3))) * scales[r] + zeros[r]
            tile[c, r + 32] = np.float32(np.int32(pair >> np.uint8(4) & np.uint8(3))) * scales[r + 32] + zeros[r + 32]
    for c in range(len(packed)):
        to = c + len(packed)
        for r in range(32):
            pair = packed[c, r]
            tile[to, r] = np.float32(np.int32(pair >> np.uint8(2) & np.uint8(3))) * scales[r] + zeros[r]
            tile[to, r + 32] = np.float32(np.int32(pair >> np.uint8(6))) * scales[r + 32] + zeros[r + 32]


@_in_order
def _merge(base_at, fine_at, merged_at, parts, words):  # type: ignore[no-untyped-def]
    """Words of 64 bits: those of the first columns of each part, then those of the second."""
    base, fine = (
        carray(_pointer(base_at), (parts, words), np.uint64),
        carray(_pointer(fine_at), (parts, words), np.uint64),
    )
    merged = carray(_pointer(merged_at), (parts, 2, words), np.uint64)
    low, high, two = np.uint64(0x3333333333333333), np.uint64(0xCCCCCCCCCCCCCCCC), np.uint64(2)
    for part in range(parts):
        for word in range(words):
            upper, lower = base[part, word], fine[part, word]
            merged[part, 0, word] = (upper & low) << two | lower & low
            merged[part, 1, word] = upper & high | lower >> two & low


@_in_order
def _unpack_eight(above, below, scales, zeros, tile):  # type: ignore[no-untyped-def]
    """The same at 8 bits: their upper and lower halves, [columns, 32] bytes each."""
    for c in range(len(tile)):
        for r in range(32):
            upper, lower = above[c, r], below[c, r]
            low = (upper & np.uint8(15)) << np.uint8(4) | lower & np.uint8(15)
            tile[c, r] = np.float32(np.int32(low)) * scales[r] + zeros[r]
            high = upper & np.uint8(240) | lower >> np.uint8(4)
            tile[c, r + 32] = np.float32(np.int32(high)) * scales[r + 32] + zeros[r + 32]


@_in_order
def _add_tile(x, s, t, start, tile, sums):  # type: ignore[no-untyped-def]
    """sums [2, 64] += columns from start on of tokens s and t times tile [columns, 64]."""
    for c in range(0, len(tile), 4):
        at = start + c
        s0, s1, s2, s3 = x[s, at], x[s, at + 1], x[s, at + 2], x[s, at + 3]
        t0, t1, t2, t3 = x[t, at], x[t, at + 1], x[t, at + 2], x[t, at + 3]
        for r in range(64):
            w0, w1, w2, w3 = tile[c, r], tile[c + 1, r], tile[c + 2, r], tile[c + 3, r]
            sums[0, r] = (((sums[0, r] + s0 * w0) + s1 * w1) + s2 * w2) + s3 * w3
            sums[1, r] = (((sums[1, r] + t0 * w0) + t1 * w1) + t2 * w2) + t3 * w3


@_in_order
def _quantized(x, rows, columns, row, weight_at, scales_at, fine_at, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns in whole groups] times a weight of 8, 4 or 2 bits: a block's group at a time."""
    bits, upper_of, fold, group_size = row[_BITS], row[_UPPER_OF], row[_FOLD], row[_GROUP_SIZE]
    blocks, groups = (rows + 63) // 64, columns // group_size
    scales_zeros = carray(_pointer(scales_at), (groups, blocks * 64, 2), np.uint16)
    scales, zeros = np.empty(64, np.float32), np.empty(64, np.float32)
    tile, sums = np.empty((group_size, 64), np.float32), np.empty(((len(x) + 1) // 2, 2, 64), np.float32)
    step = np.float32(1 << (upper_of - bits) if upper_of else 1)
    center = np.float32(1 << ((upper_of if upper_of else bits) - 1)) - (step - np.float32(1)) * np.float32(0.5)
    nbytes = group_size * 32  # of 4 bits
    merged = np.empty(nbytes, np.uint8)
    merged_at = np.int64(merged.ctypes.data)
    for block in range(blocks):
        for pair in range(len(sums)):
            for r in range(64):
                sums[pair, 0, r] = sums[pair, 1, r] = 0
        for group in range(groups):
            for r in range(64):
                scale = _wide(scales_zeros[group, block * 64 + r, 0])
                zero = _wide(scales_zeros[group, block * 64 + r, 1])
                zeros[r] = (zero * scale if row[_STEPS] else zero) - center * scale
                scales[r] = step * scale
            before = block * groups + group
            if bits == 8:
                first = weight_at + before * nbytes if fine_at else weight_at + (before + block * groups) * nbytes
                second = fine_at + before * nbytes if fine_at else first + groups * nbytes
                above = carray(_pointer(first), (group_size, 32), np.uint8)
                below = carray(_pointer(second), (group_size, 32), np.uint8)
                _unpack_eight(above, below, scales, zeros, tile)
            elif bits == 4:
                if fine_at:
                    at = before * nbytes // 2
                    _merge(weight_at + at, fine_at + at, merged_at, group_size // fold, fold * 2)
                whole_at = merged_at if fine_at else weight_at + before * nbytes
                packed = carray(_pointer(whole_at), (group_size, 32), np.uint8)
                _unpack_four(packed, scales, zeros, tile)
            else:
                for start in range(0, group_size, fold):
                    folded_at = weight_at + (before * nbytes + start * 32) // 2
                    packed = carray(_pointer(folded_at), (fold // 2, 32), np.uint8)
                    _unpack_two(packed, scales, zeros, tile[start : start + fold])
            for pair in range(len(sums)):  # the last of an odd number is computed twice, as all others are
                _add_tile(x, 2 * pair, min(2 * pair + 1, len(x) - 1), group * group_size, tile, sums[pair])
        for token in range(len(x)):
            for r in range(min(64, rows - block * 64)):
                out[token, block * 64 + r] = sums[token // 2, token % 2, r]


@_in_order
def _linear(x, row, matrix, out):  # type: ignore[no-untyped-def]
    """out [n, rows] = x [n, columns] times one matrix of an expert, plus its bias."""
    count, columns, rows = x.shape[0], x.shape[1], out.shape[1]
    first = _MATRICES + _ADDRESSES * matrix
    weight_at, scales_at, bias_at, order_at = row[first], row[first + 1], row[first + 2], row[first + 3]
    bits, group_size = row[_BITS], row[_GROUP_SIZE]
    stored = columns if bits == 16 else (columns + group_size - 1) // group_size * group_size
    if order_at != 0 or stored != columns:
        order = carray(_pointer(order_at), columns, np.uint16)
        arranged = np.zeros((count, stored), np.float32)
        for token in range(count):
            for c in range(columns):
                arranged[token, c] = x[token, order[c] if order_at != 0 else c]
        x = arranged
    if bits == 16:
        _plain(x, rows, columns, weight_at, out)
    else:
        _quantized(x, rows, stored, row, weight_at, scales_at, row[first + 4], out)
    if bias_at != 0:
        bias = carray(_pointer(bias_at), rows, np.uint16)
        for token in range(count):
            for r in range(rows):
                out[token, r] += _wide(bias[r])


@_in_order
def _gate(gates, ups, curve, numbers, has_gate):  # type: ignore[no-untyped-def]
    """gates = activation(gates, ups), or without a gate of ups alone, in float32."""
    one, half, two = np.float32(1), np.float32(0.5), np.float32(2)
    limit, alpha, beta = np.float32(numbers[0]), np.float32(numbers[1]), np.float32(numbers[2])
    bounded = limit < np.inf
    for i in np.ndindex(gates.shape):
        gate, up = (gates[i], ups[i]) if has_gate else (ups[i], one)
        if curve == _GELU:
            gates[i] = half * gate * (one + np.float32(math.erf(gate * np.float32(0.7071067811865476)))) * up
        elif curve == _RELU2:
            gates[i] = max(gate, np.float32(0)) * max(gate, np.float32(0)) * up
        elif curve == _SITU:  # tanh(y) is 2 sigmoid(2 y) - 1
            if bounded:
                up = limit * (two / (one + np.exp(-two * up / limit)) - one)
            gates[i] = beta * (two / (one + np.exp(-two * gate / beta)) - one) / (one + np.exp(-gate)) * up
        else:
            slope = alpha
            if curve == _GELU_TANH:  # (1 + tanh(y)) / 2 is sigmoid(2 y)
                slope = np.float32(1.5957691216057308) * (one + np.float32(0.044715) * gate * gate)
            elif bounded:
                up = min(max(up, -limit), limit)
                if curve == _SWIGLU:
                    gate = min(gate, limit)
            if curve == _SWIGLU:
                up += beta
            gate = gate / (one + np.exp(-slope * gate))
            if curve == _SWIGLU_STEP:
                gate = min(gate, limit)
            gates[i] = gate * up


@_in_order
def _experts(table_at, number, x_at, tokens, hidden, inner_at, wide_at, curve, numbers, has_gate, out_at, rows, stages):  # type: ignore[no-untyped-def]
    """Some stages of some experts, each at its own bit-width.

    Args:
        table_at: address of int64 [number, _ROW].
        number: of experts.
        x_at: address of bfloat16 [tokens, hidden].
        tokens: of x.
        hidden: width of x and out.
        inner_at: address of float32 [sum over experts of 2 * count * intermediate], kept from stage to stage.
        wide_at: address of float32 [largest count, hidden].
        curve: number of the activation's.
        numbers: its limit, alpha and beta.
        has_gate: whether experts have a gate.
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
            if not stages >> matrix & 1 or (matrix == 0 and not has_gate):
                continue
            if matrix < 2:
                for i in range(count):
                    _widened(x[named[i]], wide_bits[i])
                inputs, result = wide, up if matrix else gate
            else:
                _gate(gate, up, curve, numbers, has_gate)
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


def compile_everything() -> None:
    """Compile now, or read what an earlier process has compiled, and not in the first request."""
    _experts(0, 0, 0, 0, 0, 0, 0, 0, (0.0, 0.0, 0.0), True, 0, 0, _ALL)
    _combine(0, 0, 0, 0, 0, 0)
    _merge(0, 0, 0, 0, 0)
