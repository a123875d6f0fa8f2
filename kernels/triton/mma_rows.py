"""Inner products of 64 rows with up to 16 tokens on tensor cores.

They are computed straight from packed bytes; see mma_codes.

A warp owns a strip of up to 64 columns of one group at a time. Products of integer codes are sums of `code + offset`,
in float32; scale and zero are applied once per strip, and what the offset adds is taken away by the strip's sum of x,
which is one more product, with ones. Strips of a warp are added in ascending order, then warps, then parts of the
columns. None of this depends on the number of tokens, so that a token has the same bits alone and beside others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from vllm_dymoe.kernels.triton import float_rows
from vllm_dymoe.kernels.triton import section as of_section
from vllm_dymoe.kernels.triton.in_gluon import in_gluon
from vllm_dymoe.kernels.triton.mma_codes import (
    codes_of,
    constraints,
    offset_of,
    only,
    scale_layout,
    spread_layout,
    word_layout,
    x_layout,
)
from vllm_dymoe.kernels.triton.section import (
    TAG_BITS,
    code_bits,
    factor_bytes,
    group_size,
    is_float,
    is_lattice,
    order_offset,
    padded_columns,
    stored_bits,
    strip_columns,
    weight_bytes,
)

_load_bias, _unpack_scales = in_gluon(of_section.load_bias), in_gluon(of_section.unpack_scales)
_load_factor, _scale_of_byte = in_gluon(float_rows.load_factor), in_gluon(float_rows.scale_of_byte)


@gluon.jit
def mma_rows(
    section, residual, block, x, rows, first, count, split,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TAG: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, ORDERED: gl.constexpr, BIAS: gl.constexpr, INDEXED: gl.constexpr, TOKENS: gl.constexpr,
    SPLIT: gl.constexpr, WARPS: gl.constexpr, FLOAT16: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Return products with one block of 64 rows below 16 bits.

    They are over one part of the columns.

    Args:
        section: int64 address.
        residual: int64 address of the residual section, if there is one.
        block: index of the 64 rows.
        x: pointer to activations.
        rows: pointer to their rows' numbers, if INDEXED; otherwise rows are positions.
        first: the first position.
        count: number of positions, from 1 to TOKENS; what the result says of the others means nothing.
        split: index of the part of the columns, below SPLIT.
        TAG: bits of the codes, or a codebook's tag.
        NESTED: bits of codes that are stored in two sections; 4 for lattice points.
        TOKENS: 8 or 16.
        WAITS: the launch before writes x, and may still run: wait for its end when the first codes are on their way.

    Others are as in rows.quantized_rows.

    Returns:
        float32 [TOKENS, 64] in spread_layout.
    """
    BITS: gl.constexpr = code_bits(TAG)
    LATTICE: gl.constexpr = is_lattice(TAG)
    FLOATS: gl.constexpr = is_float(TAG)
    STORED: gl.constexpr = BITS if FLOATS else stored_bits(BITS, NESTED)
    WHOLE_BITS: gl.constexpr = 2 * BITS if 2 * BITS == NESTED else BITS
    TWO: gl.constexpr = BITS == 8 or STORED < BITS
    SIZE: gl.constexpr = group_size(TAG, GROUP)
    # Columns of words; at 2 bits a word serves two columns, half of a part apart.
    FOLD: gl.constexpr = 2 if STORED == 2 else 1
    PART: gl.constexpr = 64 if SIZE > 64 and (2 * BITS == NESTED or STORED < BITS) else SIZE
    SPAN: gl.constexpr = PART // FOLD
    # As wide as in fetch.py: a program computes from what it has fetched itself.
    STRIP: gl.constexpr = (32 if SIZE > 32 else SIZE) if FLOATS else strip_columns(BITS, NESTED, SIZE)
    WORDS: gl.constexpr = STRIP // FOLD
    PADDED_ROWS: gl.constexpr = (ROWS + 63) // 64 * 64
    PADDED_COLUMNS: gl.constexpr = padded_columns(COLUMNS, GROUP, TAG)
    STRIPS: gl.constexpr = PADDED_COLUMNS // STRIP
    SHARE: gl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS
    EVEN: gl.constexpr = STRIPS % (SPLIT * WARPS) == 0 and COLUMNS == PADDED_COLUMNS
    STEP: gl.constexpr = 1 << (WHOLE_BITS - BITS)
    CENTER: gl.constexpr = (1 << (WHOLE_BITS - 1)) - (STEP - 1) / 2
    OFFSET: gl.constexpr = offset_of(4 if LATTICE else BITS, FLOAT16)
    # What a point's number is of its operand: see lattice_codes and docs/format.md.
    OF_POINT: gl.constexpr = (0.125, -1.5625 - 0.625) if BITS == 4 else (0.5, -1.25 - 0.5)
    DTYPE: gl.constexpr = gl.float16 if FLOAT16 else gl.bfloat16

    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    OF_WORDS: gl.constexpr = word_layout(WARPS, WORDS // 16)
    OF_X: gl.constexpr = x_layout(WARPS, STRIP // 16, TOKENS)
    OF_SCALES: gl.constexpr = scale_layout(WARPS)

    # Words [WARPS, word, step, lane's column, column].
    warp = gl.arange(0, WARPS, only(OF_WORDS, 0))[:, None, None, None, None]
    word = gl.arange(0, 8, only(OF_WORDS, 1))[None, :, None, None, None]
    step = gl.arange(0, WORDS // 16, only(OF_WORDS, 2))[None, None, :, None, None]
    lane = gl.arange(0, 4, only(OF_WORDS, 3))[None, None, None, :, None]
    among = gl.arange(0, 4, only(OF_WORDS, 4))[None, None, None, None, :]
    words_at = section.to(gl.pointer_type(gl.int32)) + block * (PADDED_COLUMNS * STORED * 2)
    offset = warp * (WORDS * 8) + step * 128 + among * 32 + lane * 8 + word
    below_at = words_at
    if STORED == 8:
        below_at = words_at + PADDED_COLUMNS * 8
    elif TWO:
        below_at = residual.to(gl.pointer_type(gl.int32)) + block * (PADDED_COLUMNS * STORED * 2)

    # x [WARPS, step, lane's column, column, token]; at 2 bits steps of words' first columns come first.
    x_warp = gl.arange(0, WARPS, only(OF_X, 0))[:, None, None, None, None]
    x_step = gl.arange(0, STRIP // 16, only(OF_X, 1))[None, :, None, None, None]
    x_lane = gl.arange(0, 4, only(OF_X, 2))[None, None, :, None, None]
    x_among = gl.arange(0, 4, only(OF_X, 3))[None, None, None, :, None]
    token = gl.arange(0, TOKENS, only(OF_X, 4))[None, None, None, None, :]
    row = first + gl.minimum(token, count - 1)  # a column of the product for each of TOKENS, whether it is read or not
    if INDEXED:
        row = gl.load(rows + row)
    x_at = x + row.to(gl.int64) * COLUMNS
    among_words = x_step % (WORDS // 16) * 16 + x_among * 4 + x_lane + x_step // (WORDS // 16) * SPAN
    order_at = (section + order_offset(ROWS, COLUMNS, GROUP, STORED, BIAS)).to(gl.pointer_type(gl.int16))

    # Scales [WARPS, half, word, tile].
    s_warp = gl.arange(0, WARPS, only(OF_SCALES, 0, 4))[:, None, None, None]
    s_row = (
        gl.arange(0, 2, only(OF_SCALES, 1, 4))[None, :, None, None] * 32
        + gl.arange(0, 8, only(OF_SCALES, 2, 4))[None, None, :, None] * 4
        + gl.arange(0, 4, only(OF_SCALES, 3, 4))[None, None, None, :]
    )
    scales_from = section + weight_bytes(ROWS, COLUMNS, GROUP, TAG if FLOATS else STORED)

    ones = gl.full([WARPS, 16, STRIP], 1.0, DTYPE, layout=A)
    total = gl.zeros([WARPS, 64, TOKENS], gl.float32, layout=MMA)
    begin = split * SHARE
    last = gl.minimum(begin + SHARE, STRIPS)
    words = gl.load(words_at + (offset + begin * (WORDS * 8)), mask=begin + warp < last)
    below = words
    if TWO:
        below = gl.load(below_at + (offset + begin * (WORDS * 8)), mask=begin + warp < last)
    if WAITS:
        gdc_wait()
    for chunk in range(begin, last, WARPS):
        # On their way while this chunk is computed. What is not there stays undefined, and meets zeros.
        later = offset + (chunk + WARPS) * (WORDS * 8)
        next_words = gl.load(words_at + later, mask=chunk + WARPS + warp < last)
        next_below = next_words
        if TWO:
            next_below = gl.load(below_at + later, mask=chunk + WARPS + warp < last)
        column = among_words + (chunk + x_warp) * STRIP
        if WORDS < SPAN and FOLD == 2:  # a strip has a part of a group's first columns, and as many second ones
            folded = (chunk + x_warp) * WORDS
            column = among_words + (folded // SPAN * PART + folded % SPAN)
        if EVEN:
            if ORDERED:
                column = gl.load(order_at + column).to(gl.int32)
            some_x = gl.load(x_at + column)
        else:
            inside = (chunk + x_warp < last) & (column < COLUMNS)
            if ORDERED:
                column = gl.load(order_at + column, mask=inside, other=0).to(gl.int32)
            some_x = gl.load(x_at + column, mask=inside, other=0.0)
        some_x = some_x.reshape([WARPS, STRIP // 16, 4, 2, 2, TOKENS]).permute([0, 1, 3, 2, 4, 5])
        b = gl.convert_layout(some_x.reshape([WARPS, STRIP, TOKENS]), B, assert_trivial=True)
        products = gl.zeros([WARPS, 64, TOKENS], gl.float32, layout=MMA)
        if FLOATS or LATTICE or BITS < 8:
            codes = _operand(words, below, TAG, NESTED, TWO, FOLD, WARPS, STRIP, FLOAT16)
            products = mma_v2(_as_operand(codes, A, DTYPE), b, products)
        else:
            high, low = _halves(words, below, TAG, NESTED, WARPS, STRIP, FLOAT16)
            products = mma_v2(_as_operand(high, A, DTYPE), b, products)
            products = mma_v2(_as_operand(low, A, DTYPE), b, products)
        if LATTICE:
            sums = _of_all_rows(mma_v2(ones, b, gl.zeros([WARPS, 16, TOKENS], gl.float32, layout=MMA)), MMA)
            rest = gl.full_like(sums, OF_POINT[1] - OF_POINT[0] * OFFSET)
            total = gl.fma(gl.full_like(sums, OF_POINT[0]), products, gl.fma(rest, sums, total))
        else:
            group = (chunk + s_warp) // (SIZE // STRIP)
            valid = chunk + s_warp < last
            if FLOATS:
                scale = _float_scales(scales_from, (block * (PADDED_COLUMNS // SIZE) + group) * 64 + s_row, valid, TAG)
                total = gl.fma(_of_rows(scale, MMA, WARPS, TOKENS), products, total)
            else:
                scales_at = gl.multiple_of(scales_from.to(gl.pointer_type(gl.int32)) + block * 64, 16)
                if EVEN:
                    pairs = gl.load(scales_at + (group * PADDED_ROWS + s_row))
                else:
                    pairs = gl.load(scales_at + (group * PADDED_ROWS + s_row), mask=valid, other=0)
                scale, zero = _unpack_scales(pairs, STEPS, FLOAT16)
                rest = gl.fma(scale, gl.full_like(scale, -(CENTER + STEP * OFFSET)), zero)
                sums = _of_all_rows(mma_v2(ones, b, gl.zeros([WARPS, 16, TOKENS], gl.float32, layout=MMA)), MMA)
                total = gl.fma(_of_rows(rest, MMA, WARPS, TOKENS), sums, total)
                total = gl.fma(_of_rows(scale * STEP, MMA, WARPS, TOKENS), products, total)
        words = next_words
        below = next_below
    # [tile, half, word, token] is row 32 half + 4 word + tile. Every warp has all of them, until they are spread.
    LAYOUT: gl.constexpr = spread_layout(WARPS)
    of_block = gl.sum(total, 0).reshape([4, 2, 8, TOKENS]).permute([3, 1, 2, 0]).reshape([TOKENS, 64])
    result = gl.convert_layout(of_block, LAYOUT)
    if LATTICE:
        at = scales_from.to(gl.pointer_type(gl.int32)) + block * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        low_scale, high_scale = _unpack_scales(gl.load(at), 0, FLOAT16)
        result = result * (high_scale if BITS == 4 else low_scale)[None, :]
    if factor_bytes(TAG) > 0:
        result = result * _load_factor(section, ROWS, COLUMNS, GROUP, TAG)
    return result


@gluon.jit
def _of_all_rows(sums, MMA: gl.constexpr):
    """Return one tile's sums for all four tiles, which have the same ones.

    Sums are [WARPS, 16, TOKENS].
    """
    WARPS: gl.constexpr = sums.shape[0]
    TOKENS: gl.constexpr = sums.shape[2]
    two = gl.join(sums, sums)
    tiles = gl.join(two, two).permute([0, 4, 3, 1, 2]).reshape([WARPS, 64, TOKENS])
    return gl.convert_layout(tiles, MMA, assert_trivial=True)


@gluon.jit
def _of_rows(scales, MMA: gl.constexpr, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """Return scales [WARPS, half, word, tile] for products [WARPS, 64, TOKENS]."""
    of_tiles = scales.permute([0, 3, 1, 2]).reshape([WARPS, 64])
    of_tiles = gl.convert_layout(of_tiles, gl.SliceLayout(2, MMA))
    return gl.expand_dims(of_tiles, 2).broadcast_to([WARPS, 64, TOKENS])


@gluon.jit
def _float_scales(section, at, valid, TAG: gl.constexpr):
    """Load published floats' scales, float32, zero where nothing is valid."""
    if TAG == 128:
        pointer = gl.multiple_of(section.to(gl.pointer_type(gl.float32)), 16)
        return gl.load(pointer + at, mask=valid, other=0.0)
    else:
        pointer = gl.multiple_of(section.to(gl.pointer_type(gl.uint8)), 16)
        return _scale_of_byte(gl.load(pointer + at, mask=valid, other=0).to(gl.int32), TAG)


@gluon.jit
def _as_operand(codes, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """Return 16-bit patterns as what they are, in a layout that moves none of them."""
    return gl.convert_layout(codes.to(DTYPE, bitcast=True), LAYOUT, assert_trivial=True)


@gluon.jit
def _operand(
    words, below, TAG: gl.constexpr, NESTED: gl.constexpr, TWO: gl.constexpr, FOLD: gl.constexpr, WARPS: gl.constexpr,
    STRIP: gl.constexpr, FLOAT16: gl.constexpr,
):  # fmt: skip
    """Return the operands for 64 rows of a strip.

    They are int16 [WARPS, 64, STRIP] in operand A's order.
    """
    ASM: gl.constexpr = codes_of(TAG, NESTED, FLOAT16)
    REGISTERS: gl.constexpr = constraints(8 * FOLD, 1 + TWO)
    STEPS: gl.constexpr = STRIP // 16 // FOLD
    if FOLD == 1:
        if TWO:
            parts = gl.inline_asm_elementwise(ASM, REGISTERS, [words, below], (gl.int16,) * 8, is_pure=True, pack=4)
        else:
            parts = gl.inline_asm_elementwise(ASM, REGISTERS, [words], (gl.int16,) * 8, is_pure=True, pack=4)
        return _tiles(parts, 0, WARPS, STEPS)
    else:
        if TWO:
            parts = gl.inline_asm_elementwise(ASM, REGISTERS, [words, below], (gl.int16,) * 16, is_pure=True, pack=4)
        else:
            parts = gl.inline_asm_elementwise(ASM, REGISTERS, [words], (gl.int16,) * 16, is_pure=True, pack=4)
        both = gl.join(_joined(parts, 0), _joined(parts, 8))
        return both.reshape([WARPS, 8, STEPS, 4, 2, 2, 2, 2, 2, 2]).permute(
            [0, 8, 7, 6, 1, 9, 2, 4, 3, 5]
        ).reshape([WARPS, 64, STRIP])  # fmt: skip


@gluon.jit
def _halves(
    words, below, TAG: gl.constexpr, NESTED: gl.constexpr, WARPS: gl.constexpr, STRIP: gl.constexpr,
    FLOAT16: gl.constexpr,
):  # fmt: skip
    """Return the high halves of 8-bit codes times 16, and the low ones.

    Together they are larger than the codes by offset_of.
    """
    ASM: gl.constexpr = codes_of(TAG, NESTED, FLOAT16)
    REGISTERS: gl.constexpr = constraints(16, 2)
    parts = gl.inline_asm_elementwise(ASM, REGISTERS, [words, below], (gl.int16,) * 16, is_pure=True, pack=4)
    return _tiles(parts, 0, WARPS, STRIP // 16), _tiles(parts, 8, WARPS, STRIP // 16)


@gluon.jit
def _tiles(parts, FIRST: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr):
    """Return eight parts as one tensor [WARPS, 64, 16 * STEPS].

    The parts are of tiles 0 to 3 and of both halves.
    """
    parts_joined = _joined(parts, FIRST).reshape([WARPS, 8, STEPS, 4, 2, 2, 2, 2, 2])
    return parts_joined.permute([0, 8, 7, 6, 1, 2, 4, 3, 5]).reshape([WARPS, 64, 16 * STEPS])


@gluon.jit
def _joined(parts, FIRST: gl.constexpr):
    """Return eight parts as one, with three dimensions more.

    These are [half, tile % 2, tile // 2].
    """
    first = gl.join(gl.join(parts[FIRST], parts[FIRST + 1]), gl.join(parts[FIRST + 2], parts[FIRST + 3]))
    second = gl.join(gl.join(parts[FIRST + 4], parts[FIRST + 5]), gl.join(parts[FIRST + 6], parts[FIRST + 7]))
    return gl.join(first, second)


@gluon.jit
def mma_products(
    section, residual, bits, block, x, rows, first, count, split,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, PRECISIONS: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, ORDERED: gl.constexpr, BIAS: gl.constexpr, INDEXED: gl.constexpr, TOKENS: gl.constexpr,
    SPLIT: gl.constexpr, WARPS: gl.constexpr, FLOAT16: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    """Return products with 64 rows at whatever bits the section has.

    The first part adds the bias. Arguments are as in mma_rows and rows.row_products.

    Returns:
        float32 [TOKENS, 64] in spread_layout; zeros for bits that are none of PRECISIONS.
    """
    LAYOUT: gl.constexpr = spread_layout(WARPS)
    sums = gl.zeros([TOKENS, 64], gl.float32, layout=LAYOUT)
    row = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for width in gl.static_range(1, TAG_BITS):
        if PRECISIONS & (1 << width):
            if bits == (1 << width):
                sums = mma_rows(
                    section, residual, block, x, rows, first, count, split,
                    ROWS, COLUMNS, GROUP, 1 << width, 4 if is_lattice(1 << width) else NESTED,
                    STEPS >> width & 1, ORDERED >> width & 1, BIAS, INDEXED, TOKENS, SPLIT, WARPS, FLOAT16, WAITS,
                )  # fmt: skip
                if BIAS:
                    if split == 0:
                        sums += _load_bias(
                            section, row, ROWS, COLUMNS, GROUP, stored_bits(1 << width, NESTED), FLOAT16
                        )[None, :]
    return sums
