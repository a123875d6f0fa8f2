"""The int4 product of codes that lie in two halves, as fast as of those that lie together.

To put halves together for torch's int4 kernel costs as much as the kernel itself takes for one token. What is here
puts a group of one block together where the first-level cache has it, and multiplies at once. It computes what torch's
kernel does, in its order, to the last bit: weight = fma(code - 8, scale, zero), sum = fma(input, weight, sum), column
by column in float32, rounded once at the end. Every vector operation is written out, since that order is the contract.

The threads are those of torch's own pool: a second one would compete with it for the cores.
"""

import ctypes
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic
from torch import Tensor

from vllm_dymoe.kernels.small import _as_written, _narrowed, _pointer, _widened
from vllm_dymoe.residency.matrix import PackedMatrix

_LANES, _VECTORS = 16, 4  # a block of 64 rows is four vectors of float32
_UNROLLED = 4  # columns of a turn of the innermost loop
_AHEAD = 2048  # bytes of either half between what is computed and what is fetched for later
_FEWEST_BYTES = 1 << 17  # of codes for each thread: below that waking one costs more than it computes

_float, _word, _address = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_floats, _words = ir.VectorType(_float, _LANES), ir.VectorType(_word, _LANES)
_bytes = ir.VectorType(ir.IntType(8), _LANES)


def _constant(vector: ir.VectorType, values: Any) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value) for value in values])


class _Emit:
    """Vector operations where a builder stands."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        module = builder.module
        fma = ir.FunctionType(_floats, [_floats] * 3)
        self._fma = _declared(module, "llvm.fma.v16f32", fma)
        permute = ir.FunctionType(_floats, [_floats, _words])
        self._permute = _declared(module, "llvm.x86.avx512.permvar.sf.512", permute)
        prefetch = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _word, _word, _word])
        self._prefetch = _declared(module, "llvm.prefetch.p0", prefetch)
        self._levels = _constant(_floats, range(-8, 8))

    def load(self, kind: Any, base: Any, offset: int = 0) -> Any:
        """What lies some bytes behind an address."""
        at = self.builder.add(base, ir.Constant(_address, offset)) if offset else base
        return self.builder.load(self.builder.inttoptr(at, kind.as_pointer()), align=1)

    def store(self, value: Any, base: Any, offset: int) -> None:
        """The inverse."""
        at = self.builder.add(base, ir.Constant(_address, offset))
        self.builder.store(value, self.builder.inttoptr(at, value.type.as_pointer()), align=4)

    def prefetch(self, at: Any) -> None:
        """Begin to bring a line of the cache for reading; an address outside of memory does no harm."""
        arguments = [self.builder.inttoptr(at, ir.IntType(8).as_pointer())]
        self.builder.call(self._prefetch, arguments + [ir.Constant(_word, number) for number in (0, 3, 1)])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def everywhere(self, value: Any) -> Any:
        """One float32 in every lane."""
        first = self.builder.insert_element(ir.Constant(_floats, ir.Undefined), value, ir.Constant(_word, 0))
        lanes = ir.Constant(_words, None)
        return self.builder.shuffle_vector(first, ir.Constant(_floats, ir.Undefined), lanes)

    def scales_zeros(self, at: Any, number: int) -> tuple[Any, Any]:
        """Of 16 rows: pairs of bfloat16, a scale in front of its zero, are 32-bit words."""
        words = self.load(_words, at, 64 * number)
        scale = self.builder.shl(words, _constant(_words, [16] * _LANES))
        zero = self.builder.and_(words, _constant(_words, [0xFFFF0000] * _LANES))
        return self.builder.bitcast(scale, _floats), self.builder.bitcast(zero, _floats)

    def codes(self, column: Any, number: int) -> list[Any]:
        """code - 8 of rows 0 to 15, 16 to 31, 32 to 47 and 48 to 63 of a column of 32 bytes, in float32."""
        first, second = (
            self.builder.zext(self.load(_bytes, column, 32 * number + 16 * half), _words) for half in (0, 1)
        )
        shift = _constant(_words, [4] * _LANES)
        indices = first, second, self.builder.lshr(first, shift), self.builder.lshr(second, shift)
        return [self.builder.call(self._permute, [self._levels, index]) for index in indices]


def _declared(module: Any, name: str, kind: Any) -> Any:
    return module.globals[name] if name in module.globals else ir.Function(module, kind, name)


def _group_of(tokens: int) -> Any:
    """sums [tokens, 64] += x [tokens, columns] times a group of a block, for a fixed number of tokens.

    Meanwhile the halves of a later group come from memory: put together they are read in a burst, which would wait.
    """

    @intrinsic
    def group(context, codes_at, x_at, stride, scales_at, sums_at, columns, base_at, fine_at):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            codes_at, x_at, stride, scales_at, sums_at, columns, base_at, fine_at = arguments
            emit = _Emit(builder)
            scales_zeros = [emit.scales_zeros(scales_at, number) for number in range(_VECTORS)]
            rows = [builder.add(x_at, builder.mul(stride, ir.Constant(_address, token))) for token in range(tokens)]
            places = [(token, number) for token in range(tokens) for number in range(_VECTORS)]
            begun = [emit.load(_floats, sums_at, 256 * token + 64 * number) for token, number in places]
            before = builder.block
            loop, behind = builder.append_basic_block("columns"), builder.append_basic_block("behind")
            builder.branch(loop)
            builder.position_at_end(loop)
            column = builder.phi(_address)
            sums = [builder.phi(_floats) for _ in places]
            column.add_incoming(ir.Constant(_address, 0), before)
            for phi, value in zip(sums, begun, strict=True):
                phi.add_incoming(value, before)
            now = list(sums)
            here = builder.add(codes_at, builder.shl(column, ir.Constant(_address, 5)))
            inputs = [builder.add(row, builder.shl(column, ir.Constant(_address, 2))) for row in rows]
            later = builder.shl(column, ir.Constant(_address, 4))  # 16 bytes of a half for each column: a line a turn
            for half_at in (base_at, fine_at):
                emit.prefetch(builder.add(half_at, later))
            for number in range(_UNROLLED):
                codes = emit.codes(here, number)
                weights = [emit.fma(code, scale, zero) for code, (scale, zero) in zip(codes, scales_zeros, strict=True)]
                for token in range(tokens):
                    value = emit.everywhere(emit.load(_float, inputs[token], 4 * number))
                    for vector, weight in enumerate(weights):
                        at = token * _VECTORS + vector
                        now[at] = emit.fma(value, weight, now[at])
            after = builder.add(column, ir.Constant(_address, _UNROLLED))
            column.add_incoming(after, loop)
            for phi, value in zip(sums, now, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", after, columns), loop, behind)
            builder.position_at_end(behind)
            for (token, number), value in zip(places, now, strict=True):
                emit.store(value, sums_at, 256 * token + 64 * number)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 8), generate

    return group


_one_token, _two_tokens, _four_tokens = _group_of(1), _group_of(2), _group_of(4)


@intrinsic
def _put_together(context, base_at, fine_at, codes_at, half):  # type: ignore[no-untyped-def]
    """Codes of neighbouring columns of their halves: the first columns' bytes, and behind them the second ones'.

    Vectors of 64 bytes by hand: the compiler takes ones of 32 on some machines, at twice the time.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        base_at, fine_at, codes_at, half = arguments
        emit, quads = _Emit(builder), ir.VectorType(_address, 8)
        two, low, high = (_constant(quads, [value] * 8) for value in (2, 0x3333333333333333, 0xCCCCCCCCCCCCCCCC))
        before = builder.block
        loop, behind = builder.append_basic_block("halves"), builder.append_basic_block("whole")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(_address)
        place.add_incoming(ir.Constant(_address, 0), before)
        base, fine, first = (builder.add(at, place) for at in (base_at, fine_at, codes_at))
        second = builder.add(first, half)
        for offset in range(0, 512, 64):
            upper, lower = emit.load(quads, base, offset), emit.load(quads, fine, offset)
            shifted = builder.and_(builder.shl(upper, two), high), builder.and_(builder.lshr(lower, two), low)
            emit.store(builder.or_(shifted[0], builder.and_(lower, low)), first, offset)
            emit.store(builder.or_(builder.and_(upper, high), shifted[1]), second, offset)
        after = builder.add(place, ir.Constant(_address, 512))
        place.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, half), loop, behind)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


@intrinsic
def _next(context, counter):  # type: ignore[no-untyped-def]
    """Count on, whichever thread asks: what the counter was."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        counter = builder.inttoptr(arguments[0], _address.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_address, 1), "monotonic")

    return types.int64(types.int64), generate


# What a product is told, as int64: the next block that nobody has begun, numbers, and addresses.
_NEXT, _TOKENS, _COLUMNS, _BLOCKS, _GROUP_SIZE, _FOLD, _X, _BASE, _FINE, _SCALES, _OUT, _NUMBERS = range(12)


@_as_written
def _blocks(task_at):  # type: ignore[no-untyped-def]
    """Compute blocks of 64 rows as long as there are any that nobody has begun."""
    task = carray(_pointer(task_at), _NUMBERS, np.int64)
    tokens, columns, blocks, size = task[_TOKENS], task[_COLUMNS], task[_BLOCKS], task[_GROUP_SIZE]
    groups, half = columns // size, task[_FOLD] * 16
    x = carray(_pointer(task[_X]), (tokens, columns), np.uint16)
    out = carray(_pointer(task[_OUT]), (tokens, blocks * 64), np.uint16)
    codes, inputs = np.empty(size * 32, np.uint8), np.empty((tokens, columns), np.uint32)
    sums = np.empty((tokens, 64), np.float32)
    codes_at, sums_at = np.int64(codes.ctypes.data), np.int64(sums.ctypes.data)
    for token in range(tokens):
        _widened(x[token], inputs[token])
    block = _next(task_at)
    while block < blocks:
        sums[:] = 0
        for group in range(groups):
            before = (block * groups + group) * size * 16
            base_at, fine_at = task[_BASE] + before, task[_FINE] + before
            for part in range(0, size * 16, half):
                _put_together(base_at + part, fine_at + part, codes_at + 2 * part, half)
            base_at, fine_at = base_at + _AHEAD, fine_at + _AHEAD
            scales_at = task[_SCALES] + (group * blocks + block) * 256
            x_at, token = np.int64(inputs.ctypes.data) + group * size * 4, 0
            while token < tokens:
                at, to = x_at + token * columns * 4, sums_at + token * 256
                if tokens - token >= 4:
                    _four_tokens(codes_at, at, columns * 4, scales_at, to, size, base_at, fine_at)
                    token += 4
                elif tokens - token >= 2:
                    _two_tokens(codes_at, at, columns * 4, scales_at, to, size, base_at, fine_at)
                    token += 2
                else:
                    _one_token(codes_at, at, columns * 4, scales_at, to, size, base_at, fine_at)
                    token += 1
        for token in range(tokens):
            _narrowed(sums[token].view(np.uint32), out[token, block * 64 : block * 64 + 64])
        block = _next(task_at)


@cache
def _entry() -> Any:
    """_blocks as a function of C, which a pool of threads can call."""

    @cfunc(types.void(types.intp))
    def entry(task_at):  # type: ignore[no-untyped-def]
        _blocks(task_at)

    return entry


@cache
def _torch_threads() -> Any:
    """GOMP_parallel of the OpenMP that torch uses: (function, data, threads, 0). None where it uses another kind."""
    try:
        run = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return run


def compile_everything() -> None:
    """Compile now, or read what an earlier process has compiled, and not in the first request."""
    nothing = array("q", [0] * _NUMBERS)
    nothing[_GROUP_SIZE] = nothing[_FOLD] = 64
    _blocks(nothing.buffer_info()[0])
    if _torch_threads() is not None:
        _entry()


def product(x: Tensor, packed: PackedMatrix) -> Tensor:
    """x times a matrix of 4 bits in two halves, without its bias: torch's _weight_int4pack_mm_for_cpu, bit for bit.

    Args:
        x: bfloat16 [n, padded_columns].
        packed: 4 bits, nested, of bfloat16, on a CPU with AVX512.

    Returns:
        bfloat16 [n, padded_rows].
    """
    format, (base, scales, _, _, fine) = packed.format, packed.addresses
    x, tokens = x.contiguous(), x.shape[0]
    out = x.new_empty(tokens, format.padded_rows)
    sizes = 0, tokens, format.padded_columns, format.blocks, format.group_size, format.fold
    task = array("q", (*sizes, x.data_ptr(), base, fine, scales, out.data_ptr()))
    task_at = task.buffer_info()[0]
    threads = 2 * format.weight_bytes * tokens // _FEWEST_BYTES
    if threads > 1:
        threads = min(threads, torch.get_num_threads(), format.blocks)
    if threads > 1 and (run := _torch_threads()) is not None:
        run(_entry().address, task_at, threads, 0)
    else:
        _blocks(task_at)
    return out
