"""Many tokens per expert: tensor cores on tiles that are dequantized in registers.

A program computes BLOCK_M positions of one expert and BLOCK_N rows of a projection. Codes become float32 by writing
them into the mantissa of 2^23; they are scaled there and rounded once to the dtype that the tensor core multiplies.
Sums are float32.

Published floats become their levels, times scales if that is exact (4 bits, in both dtypes). Scales of FP8 are applied
to the sums of a step, and a matrix's factor at the end.

At 2 bits each word is loaded for both halves of its group, one column after the other: the second load hits the cache,
and x keeps its order.

Arguments that decode.py has as well are described there; its items have at most two positions.
"""

import triton
import triton.language as tl
from triton import knobs

from vllm_dymoe.kernels.triton.activation import down_inputs
from vllm_dymoe.kernels.triton.float_rows import load_factor
from vllm_dymoe.kernels.triton.float_tiles import load_floats, load_row_scales
from vllm_dymoe.kernels.triton.section import (
    DESCRIPTIONS,
    TAG_BITS,
    code_bits,
    factor_bytes,
    is_float,
    is_lattice,
    load_bias,
    order_offset,
    stored_bits,
    unpack_scales,
    weight_bytes,
)

# Triton's interpreter stores a bfloat16 as 16 bits and multiplies them as integers in tl.dot.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def grouped_gate_up_kernel(
    x,
    hidden,
    addresses,
    residual,
    bits,
    items,
    rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute hidden states: activation(gate x[row]) * up x[row].

    The result goes to hidden[position]; grid [items, tiles of BLOCK_N rows]. An item has at most BLOCK_M positions;
    BLOCK_N is a multiple of 64, and GROUP a multiple of BLOCK_K.
    """
    item = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.load(items + 3 * item)
    position = tl.load(items + 3 * item + 1) + tl.arange(0, BLOCK_M)
    inside = position < tl.load(items + 3 * item + 2)
    row_of_x = tl.load(rows + position, mask=inside, other=0)
    x_rows = x + row_of_x.to(tl.int64)[:, None] * COLUMNS
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    address = addresses + 3 * expert
    lower = residual + 3 * expert
    width = bits + 3 * expert
    if ACTIVATION[4]:
        gate = tile_products(
            gate, tl.load(address), lower, tl.load(width), tile, x_rows, inside,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    up = tile_products(
        up, tl.load(address + 1), lower + 1, tl.load(width + 1), tile, x_rows, inside,
        ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = hidden + position.to(tl.int64)[:, None] * ROWS + row[None, :]
    result = down_inputs(gate, up, tile * BLOCK_N, ROWS, PRECISIONS, ACTIVATION).to(hidden.dtype.element_ty)
    tl.store(at, result, mask=inside[:, None] & (row < ROWS)[None, :])


@triton.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def grouped_down_kernel(
    hidden,
    out,
    addresses,
    residual,
    bits,
    items,
    pairs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = down hidden[position]; grid and items as for gate and up."""
    item = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.load(items + 3 * item)
    position = tl.load(items + 3 * item + 1) + tl.arange(0, BLOCK_M)
    inside = position < tl.load(items + 3 * item + 2)
    source = tl.where(inside, position, 0)
    target = tl.load(pairs + position, mask=inside, other=0)
    x_rows = hidden + source.to(tl.int64)[:, None] * COLUMNS
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sums = tile_products(
        sums, tl.load(addresses + 3 * expert + 2), residual + 3 * expert + 2, tl.load(bits + 3 * expert + 2), tile,
        x_rows, inside, ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + target.to(tl.int64)[:, None] * ROWS + row[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside[:, None] & (row < ROWS)[None, :])


@triton.jit
def tile_products(
    sums, section, residual, bits, tile, x_rows, inside,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PRECISIONS: tl.constexpr, NESTED: tl.constexpr,
    STEPS: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return sums + x rows times BLOCK_N rows of a section, plus its bias.

    Args:
        sums: float32 [BLOCK_M, BLOCK_N].
        section: int64 address.
        residual: pointer to the int64 address of the residual section, for NESTED bits.
        bits: int32, one of the widths whose sum is PRECISIONS; for any other nothing is added.
        tile: index of the BLOCK_N rows.
        x_rows: pointers [BLOCK_M, 1].
        inside: [BLOCK_M], the valid rows.
    """
    FLOAT16: tl.constexpr = x_rows.dtype.element_ty == tl.float16
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    for width in tl.static_range(1, TAG_BITS):
        if PRECISIONS & (1 << width):
            if bits == (1 << width):
                for start in range(0, COLUMNS, BLOCK_K):
                    column = start + tl.arange(0, BLOCK_K)
                    x_inside = inside[:, None]
                    if COLUMNS % BLOCK_K != 0:
                        x_inside = x_inside & (column < COLUMNS)[None, :]
                    if ORDERED >> width & 1:
                        order_at = section + order_offset(ROWS, COLUMNS, GROUP, stored_bits(1 << width, NESTED), BIAS)
                        place = tl.load(order_at.to(tl.pointer_type(tl.int16)) + column).to(tl.int32)
                        x = tl.load(x_rows + place[None, :], mask=x_inside, other=0.0)
                    else:
                        x = tl.load(x_rows + column[None, :], mask=x_inside, other=0.0)
                    if is_float(1 << width):
                        weights = load_floats(
                            section, tile, start, ROWS, COLUMNS, GROUP, 1 << width, BLOCK_N, BLOCK_K, FLOAT16
                        )
                    else:
                        weights = load_weights(
                            section, residual, tile, start,
                            ROWS, COLUMNS, GROUP, code_bits(1 << width), 4 if is_lattice(1 << width) else NESTED,
                            STEPS >> width & 1, is_lattice(1 << width), BLOCK_N, BLOCK_K, FLOAT16,
                        )  # fmt: skip
                    if _INTERPRETED:
                        x = x.to(tl.float32)
                        weights = weights.to(tl.float32)
                    if width == 7:
                        scale = load_row_scales(section, tile, start, ROWS, COLUMNS, GROUP, 1 << width, BLOCK_N)
                        sums += tl.dot(x, weights) * scale[None, :]
                    else:
                        sums = tl.dot(x, weights, sums)
                if factor_bytes(1 << width) > 0:
                    sums *= load_factor(section, ROWS, COLUMNS, GROUP, 1 << width)
                if is_lattice(1 << width):
                    sums *= _row_scales(section, row, ROWS, COLUMNS, GROUP, 1 << width, FLOAT16)[None, :]
                if BIAS:
                    sums += load_bias(section, row, ROWS, COLUMNS, GROUP, stored_bits(1 << width, NESTED), FLOAT16)[
                        None, :
                    ]
    return sums


@triton.jit
def _numbers(words, offset, shift: tl.constexpr):
    """Return one half of the codes of words [...], minus `offset`.

    They are float32 [..., 2, 2]. After joining, all codes of a word are in one thread, which computes their parity
    once; a dimension of 4 would be spread over four threads.
    """
    even = tl.join(_less(words >> shift, offset), _less(words >> (shift + 16), offset))
    return tl.join(even, tl.join(_less(words >> (shift + 8), offset), _less(words >> (shift + 24), offset)))


@triton.jit
def _less(words, offset):
    return ((words & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0 - offset


@triton.jit
def _sign(words):
    """Return -1 for a word whose codes' lowest bits have odd parity, else 1.

    A word has eight codes; the result is float32. See rows.py.
    """
    return (((words & 0x11111111) * -0x77777778 & -0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _row_scales(
    section, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr,
    FLOAT16: tl.constexpr,
):  # fmt: skip
    """Return the float32 scales of some rows of a lattice.

    They are for the tile that load_weights returns.
    """
    scales_at = (section + weight_bytes(ROWS, COLUMNS, GROUP, stored_bits(TAG, 0))).to(tl.pointer_type(tl.int32))
    words = tl.load(scales_at + row, mask=row < (ROWS + 63) // 64 * 64, other=0)
    low, high = unpack_scales(words, 0, FLOAT16)
    return 0.25 * high if code_bits(TAG) == 4 else low


@triton.jit
def load_weights(
    section, residual, tile, start,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NESTED: tl.constexpr,
    STEPS: tl.constexpr, LATTICE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """Return a dequantized tile [BLOCK_K, BLOCK_N] of a transposed weight.

    It is not NaN after the last row or column. For a lattice the tile holds n, or 4 n + n_residual, which both dtypes
    hold exactly; each row has one scale.
    """
    dtype: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    column = start + tl.arange(0, BLOCK_K)
    if BITS == 16:
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        pointers = section.to(tl.pointer_type(dtype)) + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        if COLUMNS % 8 == 0:
            pointers = tl.multiple_of(pointers, [1, 16])
        if ROWS % BLOCK_N == 0 and COLUMNS % BLOCK_K == 0:
            return tl.load(pointers).trans(1, 0)
        else:
            mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
            return tl.load(pointers, mask=mask, other=0.0).trans(1, 0)
    else:
        PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
        PADDED_COLUMNS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * GROUP
        BLOCKS: tl.constexpr = BLOCK_N // 64
        block = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
        word = tl.arange(0, 8)[None, None, :]
        half = tl.arange(0, 2)[None, None, :, None, None]
        byte = tl.arange(0, 4)[None, None, None, None, :]
        STORED: tl.constexpr = stored_bits(BITS, NESTED)
        WHOLE_BITS: tl.constexpr = 2 * BITS if 2 * BITS == NESTED else BITS
        HALVES: tl.constexpr = BITS == 8 or STORED < BITS
        PART: tl.constexpr = 64 if GROUP > 64 and WHOLE_BITS == NESTED else GROUP
        FOLDED: tl.constexpr = PART // 2
        place = column // PART * FOLDED + column % FOLDED if STORED == 2 else column
        at = block * (PADDED_COLUMNS * STORED * 2) + place[:, None, None] * 8 + word
        pointers = tl.multiple_of(section.to(tl.pointer_type(tl.int32)), 16) + at
        WHOLE: tl.constexpr = PADDED_ROWS % BLOCK_N == 0
        valid = block < PADDED_ROWS // 64
        words = tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid, other=0)
        if LATTICE:
            second = 2 * (column % PART // FOLDED)[:, None, None]
            words = (words >> second) & 0x33333333
            offset = 1.5 - 0.25 * _sign(words)
            if HALVES:
                pointers = tl.multiple_of(tl.load(residual).to(tl.pointer_type(tl.int32)), 16) + at
                below = tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid, other=0)
                below = (below >> second) & 0x33333333
                words = (words << 2) | below
                offset = 4 * offset + (1.5 - 0.25 * _sign(below))
            # [BLOCK_K, BLOCKS, word, byte div 2, byte mod 2, half]
            every = tl.join(_numbers(words, offset, 0), _numbers(words, offset, 4)).to(dtype)
            return every.permute(0, 1, 5, 2, 3, 4).reshape(BLOCK_K, BLOCK_N)
        words = words[:, :, None, :, None]  # [BLOCK_K, BLOCKS, half, word, byte] below: rows in their order
        shift = 8 * byte + 4 * half
        if STORED == 2:
            shift = shift + 2 * (column % PART // FOLDED)[:, None, None, None, None]
        MASK: tl.constexpr = 3 if STORED == 2 else 15
        codes = (words >> shift) & MASK
        if HALVES:
            if STORED == 8:
                pointers += PADDED_COLUMNS * 8
            else:
                pointers = tl.multiple_of(tl.load(residual).to(tl.pointer_type(tl.int32)), 16) + at
            below = tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid, other=0)
            codes = codes * (MASK + 1) + ((below[:, :, None, :, None] >> shift) & MASK)
        codes = codes.reshape(BLOCK_K, BLOCK_N)
        # 2^23 with the code in its last bits is 2^23 + code: a conversion without a conversion instruction.
        STEP: tl.constexpr = 1 << (WHOLE_BITS - BITS)
        CENTER: tl.constexpr = (1 << (WHOLE_BITS - 1)) - (STEP - 1) / 2
        floats = (codes | 0x4B000000).to(tl.float32, bitcast=True)
        floats = (floats - 8388608.0) * STEP - CENTER if STEP > 1 else floats - (8388608.0 + CENTER)
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        scales_at = (section + weight_bytes(ROWS, COLUMNS, GROUP, STORED)).to(tl.pointer_type(tl.int32))
        scales_at = tl.multiple_of(scales_at, 16) + start // GROUP * PADDED_ROWS + row
        scales = tl.load(scales_at) if WHOLE else tl.load(scales_at, mask=row < PADDED_ROWS, other=0)
        scale, zero = unpack_scales(scales, STEPS, FLOAT16)
        return (floats * scale[None, :] + zero[None, :]).to(dtype)
