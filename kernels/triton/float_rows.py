"""Inner products of 64 rows of published floats with one or two tokens.

This is like rows.py for other encodings.

A thread keeps one word of a column, eight rows, and walks along the columns. A code becomes a float32 by placing its
bits at the sign, the lowest exponent bits and the upper mantissa: this is its level times 2^-126 (e2m1) or 2^-120
(e4m3), also for subnormal codes, because the float32 is then subnormal as well. One product scales it back exactly.
Scales are applied once per strip, to the strip's sums, and a matrix's factor at the end.

The order of every sum depends on the shape alone, never on where the bytes are.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.section import (
    bias_offset,
    code_bits,
    factor_bytes,
    group_size,
    padded_columns,
    weight_bytes,
)


@triton.jit
def float_rows(
    section, block, x, apart, split,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return products with one block of 64 rows, over one part of the columns.

    Arguments and result are those of quantized_rows.

    Args:
        TAG: of the codebook.
    """
    THREADS: tl.constexpr = 32 * WARPS
    BITS: tl.constexpr = code_bits(TAG)
    SIZE: tl.constexpr = group_size(TAG, GROUP)
    STRIP: tl.constexpr = 32 if SIZE > 32 else SIZE
    PADDED_COLUMNS: tl.constexpr = padded_columns(COLUMNS, GROUP, TAG)
    GROUPS: tl.constexpr = PADDED_COLUMNS // SIZE
    STRIPS: tl.constexpr = PADDED_COLUMNS // STRIP
    SHARE: tl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS

    # [TOKENS, 2, 4, THREADS]: token, half of the 64 rows, byte of a word, thread; see quantized_rows.
    thread = tl.arange(0, THREADS)[None, None, None, :]
    word = thread & 7
    beside = (thread >> 3) & 3
    warp = thread >> 5
    byte = tl.arange(0, 4)[None, None, :, None]
    half = tl.arange(0, 2)[None, :, None, None]
    # Shift that moves a code's four bits to the upper end of its word.
    up = 28 - 8 * byte - 4 * half
    words_at = section.to(tl.pointer_type(tl.int32)) + block * (PADDED_COLUMNS * BITS * 2) + (8 * beside + word)
    scales_at = section + weight_bytes(ROWS, COLUMNS, GROUP, TAG)
    sums = tl.zeros([TOKENS, 2, 4, THREADS], tl.float32)

    last = tl.minimum((split + 1) * SHARE, STRIPS)
    for chunk in range(split * SHARE, last, WARPS):
        strip = chunk + warp
        valid = strip < last
        column = beside + strip * STRIP
        products = tl.zeros([TOKENS, 2, 4, THREADS], tl.float32)
        for step in tl.static_range(STRIP // 4):
            some_x = load_x(x + column + 4 * step, apart, valid & (column + 4 * step < COLUMNS), TOKENS, False)
            pointers = words_at + strip * (STRIP * 8) + 32 * step
            codes = tl.load(pointers, mask=valid, other=0) << up
            if BITS == 8:
                below = tl.load(pointers + PADDED_COLUMNS * 8, mask=valid, other=0) << up
                levels = _e4m3(codes, below)
            else:
                levels = _e2m1(codes)
            products += some_x * levels
        group = block * GROUPS + (strip * STRIP) // SIZE
        sums += _scales(scales_at, group, word, byte, half, valid, TAG) * products
    if factor_bytes(TAG) > 0:
        sums *= load_factor(section, ROWS, COLUMNS, GROUP, TAG)
    # Row 32 half + 4 word + byte of [TOKENS, half, byte, word].
    rows = tl.sum(sums.reshape(TOKENS, 2, 4, 4 * WARPS, 8), 3)
    return rows.permute(0, 1, 3, 2).reshape(TOKENS, 64)


@triton.jit
def load_x(x, apart, mask, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """Load float32 [TOKENS, 1, 1, THREADS] of x; masked elements are 0.

    Pointers are [1, 1, 1, THREADS] into the first token's row. There is one load per token: Triton 3.6 gives the result
    of a single load another layout than the words, and would convert it each time.

    Args:
        apart: distance to the second token's row, in elements.
        ALL: nothing is masked; this saves the instruction that sets the zero.
    """
    first = (tl.load(x) if ALL else tl.load(x, mask=mask, other=0)).to(tl.float32)
    if TOKENS == 1:
        return first
    second = (tl.load(x + apart) if ALL else tl.load(x + apart, mask=mask, other=0)).to(tl.float32)
    return tl.where(tl.arange(0, TOKENS)[:, None, None, None] == 0, first, second)


@triton.jit
def _e2m1(codes):
    """Return levels of e2m1 codes, float32.

    Each code is the upper four bits of an int32.
    """
    bits = (codes & -0x80000000) | ((codes >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _e4m3(above, below):
    """Return levels of e4m3 codes, float32.

    The halves of each code are the upper four bits of two int32.
    """
    bits = (above & -0x80000000) | ((above >> 4) & 0x07000000) | ((below >> 8) & 0x00F00000)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _scales(scales_at, group, word, byte, half, valid, TAG: tl.constexpr):
    """Return the scales of eight rows per thread.

    They are float32 [1, 2, 4, THREADS], zero where nothing is valid.

    Args:
        group: index of the group of 64 scales.
    """
    if TAG == 128:
        # One byte of the words at a time: adjacent scales in one load would be spread over threads, and have to be
        # moved back.
        pointers = scales_at.to(tl.pointer_type(tl.float32)) + group * 64 + (4 * word + 32 * half)
        scales = tl.where(byte == 0, tl.load(pointers, mask=valid, other=0), 0.0)
        for number in tl.static_range(1, 4):
            scales += tl.where(byte == number, tl.load(pointers + number, mask=valid, other=0), 0.0)
        return scales
    else:
        # Four scales in a word.
        pointers = scales_at.to(tl.pointer_type(tl.int32)) + group * 16 + (word + 8 * half)
        return scale_of_byte((tl.load(pointers, mask=valid, other=0) >> (8 * byte)) & 255, TAG)


@triton.jit
def scale_of_byte(scale, TAG: tl.constexpr):
    """Return a scale's float32 from its byte in an int32.

    An exponent of -127 gives 0, since it is below every sum.
    """
    if TAG == 32:
        return (scale << 23).to(tl.float32, bitcast=True)
    else:
        bits = ((scale & 128) << 24) | ((scale & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def load_factor(section, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr):
    """Return the factor of a matrix, by which all products are multiplied."""
    address = section + (bias_offset(ROWS, COLUMNS, GROUP, TAG) - factor_bytes(TAG))
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.load(pointer) / tl.load(pointer + 1)
