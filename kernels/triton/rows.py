"""Inner products of 64 rows with one or two tokens: the core of decode.

They are computed straight from packed bytes.

Decode is bound by memory: a weight is read once and multiplied once or twice. Tensor cores would idle, and bringing
dequantized tiles to them through shared memory would cost more than the products. What has to be small is the number
of instructions per weight: an H200 issues about 3.5 of them in the time in which its memory delivers one 4-bit weight.

- A thread keeps one word of a column: eight rows at 4 bits. It walks along the columns, taking every fourth one of a
  strip, so that a warp's load is 128 contiguous bytes and nothing crosses lanes before the end.
- A code becomes a float by writing it into the mantissa of 1.0: (word & mask) | 0x3F800000 is exactly 1 + code / 2^n,
  one instruction and no conversion. The sum of x that this adds is known, and subtracted once per strip.
- Scale and zero are applied once per strip, to the strip's sums: the sum of x ((code - mid) scale + zero) is scale
  sum(x code) + (zero - mid scale) sum(x).
- A warp handles a strip of up to 64 columns of one group, so that the line above is rare.
- Eight codes of a thread's word are a lattice point, whose parity shifts all of them: it flips the sign of x in a
  separate sum, four instructions for eight weights. Each row has one scale, applied at the end.
- If columns are reordered, x is read in their order: one more load per x, which all rows of a word share, an eighth to
  a sixth more instructions. A separate kernel that sorts x would cost a launch.

The order of every sum depends on the shape alone, never on where the bytes are.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.float_rows import float_rows, load_x
from vllm_dymoe.kernels.triton.section import (
    TAG_BITS,
    code_bits,
    is_float,
    is_lattice,
    load_bias,
    order_offset,
    stored_bits,
    strip_columns,
    unpack_scales,
    weight_bytes,
)


@triton.jit
def quantized_rows(
    section,
    residual,
    block,
    x,
    apart,
    split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    LATTICE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
    FLOAT16: tl.constexpr,
):
    """Return products with one block of 64 rows of 8, 4 or 2 bits.

    They are over one part of the columns.

    Args:
        section: int64 address.
        residual: int64 address of the residual section, if NESTED is BITS.
        block: index of the 64 rows.
        x: pointer to a row.
        apart: int64, distance to the second token's row in elements, if TOKENS is 2.
        split: index of the part of the columns, below SPLIT.
        NESTED: bits of codes that are stored in two sections; BITS is this, or half of it for the base slice alone.
        STEPS: zeros count steps of their scale.
        ORDERED: stored columns are reordered.
        BIAS: there is a bias before that order.
        LATTICE: codes are lattice points, NESTED is then 4, and x is rotated.

    Returns:
        float32 [TOKENS, 64].
    """
    THREADS: tl.constexpr = 32 * WARPS
    STORED: tl.constexpr = stored_bits(BITS, NESTED)
    WHOLE_BITS: tl.constexpr = 2 * BITS if 2 * BITS == NESTED else BITS
    # Columns of words; at 2 bits a word serves two columns, half of a part apart. Two sections of 2 bits have a strip's
    # 4-bit codes in as many words, and are read in the order of one.
    FOLD: tl.constexpr = 2 if BITS == 2 else 1
    PART: tl.constexpr = 64 if GROUP > 64 and 2 * BITS == NESTED else GROUP
    SPAN: tl.constexpr = PART // FOLD
    STRIP: tl.constexpr = strip_columns(BITS, NESTED, GROUP) // FOLD
    PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
    PADDED_COLUMNS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * GROUP
    STRIPS: tl.constexpr = PADDED_COLUMNS // FOLD // STRIP
    # A share is a whole number of strips for each warp.
    SHARE: tl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS
    EVEN: tl.constexpr = STRIPS % WARPS == 0 and COLUMNS == PADDED_COLUMNS
    STEP: tl.constexpr = 1 if LATTICE else 1 << (WHOLE_BITS - BITS)
    CENTER: tl.constexpr = (1 << (WHOLE_BITS - 1)) - (STEP - 1) / 2

    # [TOKENS, 2, 4, THREADS]: token, half of the 64 rows, byte of a word, thread. All dimensions except threads are
    # registers: the compiler then has one layout to choose from, and moves nothing between threads in the loop. One
    # tensor of four dimensions instead of several of fewer: the time to compile grows with the cube of the operations
    # here.
    thread = tl.arange(0, THREADS)[None, None, None, :]
    word = thread & 7
    beside = (thread >> 3) & 3
    warp = thread >> 5
    byte = tl.arange(0, 4)[None, None, :, None]
    half = tl.arange(0, 2)[None, :, None, None]
    # Shift that moves byte b of a word to bits 15 to 22, the upper mantissa.
    left = tl.maximum(15 - 8 * byte, 0)
    right = tl.maximum(8 * byte - 15, 0)
    nibble = 4 * half
    # A code of the low half is this factor smaller than its place in the mantissa says; the factor of the high half is
    # smaller.
    factor = tl.where(half == 0, 256.0 * STEP, (256.0 if BITS == 8 else 16.0) * STEP)
    # 0x3F800000, the bits of 1.0, in a form that the compiler cannot see through: of two constants in one instruction
    # it would load one again each time.
    one = 0x3F800000 + (section >> 62).to(tl.int32)

    first_word = block * (PADDED_COLUMNS * STORED * 2) + (8 * beside + word)
    words_at = section.to(tl.pointer_type(tl.int32)) + first_word
    # At 8 bits in one section the lower halves of a block follow the upper ones.
    residual_at = words_at + PADDED_COLUMNS * 8 if STORED == 8 else residual.to(tl.pointer_type(tl.int32)) + first_word
    scales_at = (section + weight_bytes(ROWS, COLUMNS, GROUP, STORED)).to(tl.pointer_type(tl.int32))
    scales_at = tl.multiple_of(scales_at + block * 64, 16) + (4 * word + byte + 32 * half)
    if ORDERED:
        order_at = (section + order_offset(ROWS, COLUMNS, GROUP, STORED, BIAS)).to(tl.pointer_type(tl.int16))
    sums = tl.zeros([TOKENS, 2, 4, THREADS], tl.float32)

    last = tl.minimum((split + 1) * SHARE, STRIPS)
    words = _load_words(words_at, residual_at, split * SHARE + warp, last, STRIP, BITS, STORED)
    for chunk in range(split * SHARE, last, WARPS):
        strip = chunk + warp
        # In flight while this chunk is computed. Masked words stay undefined, and are multiplied by zeros.
        next_words = _load_words(words_at, residual_at, strip + WARPS, last, STRIP, BITS, STORED)
        valid = strip < last
        folded = strip * STRIP
        group = folded * FOLD // GROUP
        column = beside + (folded if FOLD == 1 else folded // SPAN * PART + folded % SPAN)
        products = tl.zeros([TOKENS, 2, 4, THREADS], tl.float32)
        total = tl.zeros([TOKENS, 1, 1, THREADS], tl.float32)
        ones = total
        flipped = total
        for step in tl.static_range(STRIP // 4):
            if ORDERED:
                some_x = _load_by(
                    order_at + column + 4 * step, x, apart, valid & (column + 4 * step < COLUMNS), TOKENS, EVEN
                )
            else:
                some_x = load_x(x + column + 4 * step, apart, valid & (column + 4 * step < COLUMNS), TOKENS, EVEN)
            total += some_x
            ones += some_x
            if BITS == 8:
                above = words[2 * step]
                below = words[2 * step + 1]
                low = ((above & 0x0F0F0F0F) << 4) | (below & 0x0F0F0F0F)
                high = (above & -0x0F0F0F10) | ((below >> 4) & 0x0F0F0F0F)
                products += some_x * _factors((tl.where(half == 0, low, high) << left) >> right, 0x7F8000, one)
            elif BITS == 4:
                if STORED == 4:
                    codes = words[step]
                elif step < STRIP // 8:
                    codes = ((words[2 * step] & 0x33333333) << 2) | (words[2 * step + 1] & 0x33333333)
                else:
                    above = words[2 * step - STRIP // 4]
                    codes = (above & -0x33333334) | ((words[2 * step - STRIP // 4 + 1] >> 2) & 0x33333333)
                products += some_x * _factors((codes << left) >> right, 0x078000 << nibble, one)
                if LATTICE:
                    flipped += _by_parity(some_x, codes, 0x44444444, 0x22222222)
                    flipped += 0.25 * _by_parity(some_x, codes, 0x11111111, -0x77777778)
            else:
                if LATTICE:
                    flipped += 0.25 * _by_parity(some_x, words[step], 0x11111111, -0x77777778)
                codes = (words[step] << left) >> right
                products += some_x * _factors(codes, 0x018000 << nibble, one)
                beyond = column + SPAN + 4 * step
                if ORDERED:
                    some_x = _load_by(order_at + beyond, x, apart, valid & (beyond < COLUMNS), TOKENS, EVEN)
                else:
                    some_x = load_x(x + beyond, apart, valid & (beyond < COLUMNS), TOKENS, EVEN)
                total += some_x
                if LATTICE:
                    flipped += 0.25 * _by_parity(some_x, words[step], 0x44444444, 0x22222222)
                # Its codes are two bits higher in the mantissa, so a quarter of it brings them to the same sum.
                some_x *= 0.25
                ones += some_x
                products += some_x * _factors(codes, 0x060000 << nibble, one)
        if LATTICE:
            # A point is codes - 1.25 - p / 2, and x p is half of x minus the flipped x; a residual point is a quarter
            # of that.
            sums += (products - ones) * factor + (flipped - (7.5 if BITS == 4 else 1.5) * total)
        else:
            scale, zero = unpack_scales(_load(scales_at + group * PADDED_ROWS, valid, EVEN), STEPS, FLOAT16)
            # The compiler could choose which of two products to round: Triton 3.8 chose differently for some rows of a
            # token alone than for one of two tokens.
            sums += tl.fma(scale, (products - ones) * factor, (zero - scale * CENTER) * total)
        words = next_words
    if LATTICE:
        low, high = unpack_scales(tl.load(scales_at), 0, FLOAT16)
        sums *= 0.25 * high if BITS == 4 else low
    # Row 32 half + 4 word + byte of [TOKENS, half, byte, word].
    rows = tl.sum(sums.reshape(TOKENS, 2, 4, 4 * WARPS, 8), 3)
    return rows.permute(0, 1, 3, 2).reshape(TOKENS, 64)


@triton.jit
def _load_words(words_at, residual_at, strip, last, STRIP: tl.constexpr, BITS: tl.constexpr, STORED: tl.constexpr):
    """Load a strip for each warp.

    Returns:
        a tuple of int32 tensors shaped like `strip`, one per step; codes in two sections give pairs of tensors.
    """
    LOADS: tl.constexpr = STRIP // 8 if BITS == 4 and STORED == 2 else STRIP // 4
    at = strip * (LOADS * 32)
    words = ()
    for step in tl.static_range(LOADS):
        words = words + (tl.load(words_at + at + 32 * step, mask=strip < last),)
        if BITS == 8 or STORED < BITS:
            words = words + (tl.load(residual_at + at + 32 * step, mask=strip < last),)
    return words


@triton.jit
def _by_parity(x, words, mask, factor):
    """Return -x where the eight bits under a mask have odd parity, else x.

    `factor` adds the bits up in the last bit.
    """
    return (((words & mask) * factor & -0x80000000) ^ x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _load(pointers, mask, ALL: tl.constexpr):
    """Load, with zeros where masked.

    ALL: nothing is masked, which saves the instruction that sets the zero.
    """
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_by(order_at, x, apart, mask, TOKENS: tl.constexpr, ALL: tl.constexpr):
    """Load the float32 inputs that some stored columns multiply.

    They are [TOKENS, 1, 1, THREADS].
    """
    return load_x(x + _load(order_at, mask, ALL).to(tl.int32), apart, mask, TOKENS, ALL)


@triton.jit
def _factors(codes, mask, one):
    """Return 1 + code / 2^n for the codes under a mask; `one` has the bits of 1.0."""
    return ((codes & mask) | one).to(tl.float32, bitcast=True)


@triton.jit
def plain_rows(
    section,
    block,
    x,
    apart,
    split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
    FLOAT16: tl.constexpr,
):
    """Return products with one block of 64 rows of 16 bits.

    Arguments and result are as in quantized_rows.
    """
    # 64 sums for each thread: with 8 warps a lane has eight columns, which are one load. With two tokens half of the
    # rows come at a time, so that a token's sums are taken in one order, alone or with another token.
    WIDTH: tl.constexpr = 32 * WARPS
    STRIPS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    SHARE: tl.constexpr = (STRIPS + SPLIT - 1) // SPLIT
    HEIGHT: tl.constexpr = 64 // WARPS // TOKENS
    WHOLE_X: tl.constexpr = COLUMNS % WIDTH == 0
    dtype: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    warp = tl.arange(0, WARPS)[:, None]
    rows = tl.zeros([TOKENS, 64 // WARPS, WARPS], tl.float32)
    for half in tl.static_range(TOKENS):
        first_row = block * 64 + half * HEIGHT * WARPS + warp
        weights_at = section.to(tl.pointer_type(dtype)) + first_row.to(tl.int64) * COLUMNS
        sums = ()
        for _ in tl.static_range(HEIGHT * TOKENS):
            sums = sums + (tl.zeros([WARPS, WIDTH], tl.float32),)
        for strip in range(split * SHARE, tl.minimum((split + 1) * SHARE, STRIPS)):
            column = strip * WIDTH + tl.arange(0, WIDTH)[None, :]
            inside = column < COLUMNS
            # The same row of x for every warp.
            first = _load(x + column + 0 * warp, inside, WHOLE_X).to(tl.float32)
            if TOKENS == 2:
                second = _load(x + apart + column + 0 * warp, inside, WHOLE_X).to(tl.float32)
            added = ()
            for height in tl.static_range(HEIGHT):
                pointers = weights_at + height * WARPS * COLUMNS + column
                if COLUMNS % 8 == 0:
                    # Then rows begin at multiples of 16 bytes, because sections do: one load fetches eight weights.
                    pointers = tl.multiple_of(pointers, [1, 16])
                row = first_row + height * WARPS
                weights = _load(pointers, (row < ROWS) & inside, WHOLE_X and ROWS % 64 == 0).to(tl.float32)
                added = added + (sums[height * TOKENS] + weights * first,)
                if TOKENS == 2:
                    added = added + (sums[height * TOKENS + 1] + weights * second,)
            sums = added
        for number in tl.static_range(HEIGHT * TOKENS):
            token = tl.arange(0, TOKENS)[:, None, None] == number % TOKENS
            of_warp = tl.arange(0, 64 // WARPS)[None, :, None] == half * HEIGHT + number // TOKENS
            rows = tl.where(token & of_warp, tl.sum(sums[number], 1)[None, None, :], rows)
    return rows.reshape(TOKENS, 64)


@triton.jit
def row_products(
    section,
    residual,
    bits,
    block,
    x,
    apart,
    split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
    FLOAT16: tl.constexpr,
):
    """Return products with 64 rows at the bits of the section.

    The first part adds the bias.

    Args:
        section: int64 address.
        residual: int64 address of the residual section, if the bits are NESTED.
        bits: int32, one of the widths whose sum is PRECISIONS, or the tag of a codebook among them; for any other the
            products are zero.
        block: as in quantized_rows, like the others.
        x: pointer to a row.
        apart: int64, distance to the second token's row in elements.
        split: index of the part of the columns.
        NESTED: bits of codes in two sections; half as many bits are the base slices of such codes.
        STEPS: sum of the widths whose zeros count steps.
        ORDERED: sum of the widths whose columns are reordered.

    Returns:
        float32 [TOKENS, 64].
    """
    sums = tl.zeros([TOKENS, 64], tl.float32)
    row = block * 64 + tl.arange(0, 64)
    for width in tl.static_range(1, TAG_BITS):
        if PRECISIONS & (1 << width):
            if bits == (1 << width):
                if width == 4:
                    sums = plain_rows(section, block, x, apart, split, ROWS, COLUMNS, TOKENS, SPLIT, WARPS, FLOAT16)
                elif is_float(1 << width):
                    sums = float_rows(
                        section, block, x, apart, split, ROWS, COLUMNS, GROUP, 1 << width, TOKENS, SPLIT, WARPS
                    )
                else:
                    sums = quantized_rows(
                        section, residual, block, x, apart, split,
                        ROWS, COLUMNS, GROUP, code_bits(1 << width), 4 if is_lattice(1 << width) else NESTED,
                        STEPS >> width & 1, ORDERED >> width & 1, BIAS, is_lattice(1 << width),
                        TOKENS, SPLIT, WARPS, FLOAT16,
                    )  # fmt: skip
                if BIAS:
                    if split == 0:
                        sums += load_bias(section, row, ROWS, COLUMNS, GROUP, stored_bits(1 << width, NESTED), FLOAT16)[
                            None, :
                        ]
    return sums
