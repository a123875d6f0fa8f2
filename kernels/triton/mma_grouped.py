"""Large batches below 16 bits in Gluon, with weights in registers.

The launches are those of ``grouped.py``. A program computes 256 rows, 64 of each of its four warps, for up to 64
positions of one expert, along the columns in steps of a strip:

    words     prefetched to registers, a strip ahead
    weights   rounded once to 16 bits, in the registers of mma.m16n8k16's operand A; see mma_codes: of integer codes
              (code - center) * scale + zero; of published floats level * scale, exact at 4 bits; of lattice codes the
              point, which is exact, because a row has one scale, for its sum
    x         copied to shared memory by cp.async, two strips ahead, for all warps; read by ldmatrix as operand B

For gate and up two warps have blocks of gate and two the same blocks of up; they meet after the last strip. Fewer than
33 positions have tiles of 8, 16 or 32. An output is the sum of the same products in the same order in each of them, so
a token has the same bits however many others its expert has here. Weights have the bits that ``grouped.py``, the plain
twin, gives them; sums of its tiles differ in their last bits. It scales FP8 after the products, for which there are no
registers here: each weight is rounded instead, as ``dequantize`` does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vllm_dymoe.kernels.triton import activation as of_activation
from vllm_dymoe.kernels.triton import mma_rows
from vllm_dymoe.kernels.triton import section as of_section
from vllm_dymoe.kernels.triton.in_gluon import barrier, in_gluon
from vllm_dymoe.kernels.triton.mma_codes import offset_of, only, word_layout
from vllm_dymoe.kernels.triton.section import (
    DESCRIPTIONS,
    TAG_BITS,
    code_bits,
    down_rotation,
    factor_bytes,
    group_size,
    is_float,
    is_lattice,
    padded_columns,
    scale_bytes,
    stored_bits,
    strip_columns,
    weight_bytes,
)

_operand, _halves = mma_rows._operand, mma_rows._halves
_load_factor, _scale_of_byte = mma_rows._load_factor, mma_rows._scale_of_byte
_unpack_scales = mma_rows._unpack_scales
_gated, _load_bias = in_gluon(of_activation.gated), in_gluon(of_section.load_bias)
# Triton renamed it in 3.8.
_load_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_NO_ACTIVATION = gl.constexpr((0, 0.0, 0.0, 0.0, False))


@gluon.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def mma_grouped_gate_up_kernel(
    x,
    hidden,
    addresses,
    residual,
    bits,
    items,
    rows,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    PRECISIONS: gl.constexpr,
    NESTED: gl.constexpr,
    STEPS: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """hidden[position] = activation(gate x[row]) * up x[row].

    The grid is [items, tiles of 128 rows], or of 256 without a gate. An item has at most 64 positions.
    Gate has the bits of up.
    """
    at = items + 3 * gl.program_id(0)
    expert = gl.load(at)
    first = gl.load(at + 1)
    count = gl.load(at + 2) - first
    up_at = 3 * expert + 1
    gate_at = up_at - 1 if ACTIVATION[4] else up_at
    _tiles(
        x, hidden, addresses, residual, gate_at, up_at, gl.load(bits + up_at), rows, first, count,
        ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, BIAS, ACTIVATION, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def mma_grouped_down_kernel(
    hidden,
    out,
    addresses,
    residual,
    bits,
    items,
    pairs,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    PRECISIONS: gl.constexpr,
    NESTED: gl.constexpr,
    STEPS: gl.constexpr,
    BIAS: gl.constexpr,
):
    """out[pair] = down hidden[position].

    The grid is [items, tiles of 256 rows]; items are as for gate and up.
    """
    at = items + 3 * gl.program_id(0)
    expert = gl.load(at)
    first = gl.load(at + 1)
    count = gl.load(at + 2) - first
    down_at = 3 * expert + 2
    _tiles(
        hidden, out, addresses, residual, down_at, down_at, gl.load(bits + down_at), pairs, first, count,
        ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, BIAS, _NO_ACTIVATION, False,
    )  # fmt: skip


@gluon.jit
def _tiles(
    x, out, addresses, residual, gate_at, up_at, width, index, first, count,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, PRECISIONS: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Compute up to 64 positions from `first` on, on the smallest possible tile.

    Args:
        index: rows of x, if INDEXED, as for gate and up; otherwise, for down, rows of the output.
    """
    if count > 0:
        gate = gl.load(addresses + gate_at)
        up = gl.load(addresses + up_at)
        gate_below = gate
        up_below = up
        if NESTED > 0:
            gate_below = gl.load(residual + gate_at)
            up_below = gl.load(residual + up_at)
        for tag in gl.static_range(1, TAG_BITS):
            if PRECISIONS & (1 << tag):
                if width == (1 << tag):
                    if count > 32:
                        _tile(
                            x, out, gate, up, gate_below, up_below, index, first, count,
                            ROWS, COLUMNS, GROUP, 1 << tag, NESTED, STEPS >> tag & 1, BIAS, ACTIVATION, INDEXED, 64,
                        )  # fmt: skip
                    elif count > 16:
                        _tile(
                            x, out, gate, up, gate_below, up_below, index, first, count,
                            ROWS, COLUMNS, GROUP, 1 << tag, NESTED, STEPS >> tag & 1, BIAS, ACTIVATION, INDEXED, 32,
                        )  # fmt: skip
                    elif count > 8:
                        _tile(
                            x, out, gate, up, gate_below, up_below, index, first, count,
                            ROWS, COLUMNS, GROUP, 1 << tag, NESTED, STEPS >> tag & 1, BIAS, ACTIVATION, INDEXED, 16,
                        )  # fmt: skip
                    else:
                        _tile(
                            x, out, gate, up, gate_below, up_below, index, first, count,
                            ROWS, COLUMNS, GROUP, 1 << tag, NESTED, STEPS >> tag & 1, BIAS, ACTIVATION, INDEXED, 8,
                        )  # fmt: skip


@gluon.jit
def _tile(
    x, out, gate, up, gate_below, up_below, index, first, count,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TAG: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, INDEXED: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Compute up to TOKENS positions from `first` on, and store them."""
    sums = _products(
        gate, up, gate_below, up_below, x, index, first, count,
        ROWS, COLUMNS, GROUP, TAG, NESTED, STEPS, INDEXED, ACTIVATION[4], TOKENS,
    )  # fmt: skip
    if TOKENS == 64:  # in halves, for which warps need half as much memory to meet
        one, other = gl.split(sums.reshape([256, 2, 32]).permute([0, 2, 1]))
        _store(
            one, out, gate, up, index, first, count, ROWS, COLUMNS, GROUP, TAG, NESTED, BIAS, ACTIVATION, INDEXED, 32
        )
        _store(
            other, out, gate, up, index, first + 32, count - 32,
            ROWS, COLUMNS, GROUP, TAG, NESTED, BIAS, ACTIVATION, INDEXED, 32,
        )  # fmt: skip
    else:
        _store(
            sums, out, gate, up, index, first, count,
            ROWS, COLUMNS, GROUP, TAG, NESTED, BIAS, ACTIVATION, INDEXED, TOKENS,
        )  # fmt: skip


@gluon.jit
def _store(
    sums, out, gate_section, up_section, index, first, count,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TAG: gl.constexpr, NESTED: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, INDEXED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Finish sums [256, TOKENS] of products and store them.

    The activation is applied to those of gate and up.
    """
    FLOAT16: gl.constexpr = out.dtype.element_ty == gl.float16
    STORED: gl.constexpr = stored_bits(TAG, NESTED)
    PAIR: gl.constexpr = ACTIVATION[4]
    OUTPUTS: gl.constexpr = 128 if PAIR else 256
    # [tile, warp, half, word, token]; a block's row is 32 half + 4 word + tile.
    values = sums.reshape([4, 4, 2, 8, TOKENS]).permute([4, 1, 2, 3, 0]).reshape([TOKENS, 256])
    values = gl.convert_layout(values, output_layout(TOKENS, PAIR))
    gate = values
    if PAIR:
        gate, values = gl.split(values.reshape([TOKENS, 2, OUTPUTS]).permute([0, 2, 1]))
    if factor_bytes(TAG) > 0:
        values *= _load_factor(up_section, ROWS, COLUMNS, GROUP, TAG)
        if PAIR:
            gate *= _load_factor(gate_section, ROWS, COLUMNS, GROUP, TAG)
    LAYOUT: gl.constexpr = values.type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.program_id(1) * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, LAYOUT))[None, :]
    if is_lattice(TAG):
        values *= _row_scales(up_section, row, ROWS, COLUMNS, GROUP, TAG, FLOAT16)
        if PAIR:
            gate *= _row_scales(gate_section, row, ROWS, COLUMNS, GROUP, TAG, FLOAT16)
    if BIAS:
        values += _load_bias(up_section, row, ROWS, COLUMNS, GROUP, STORED, FLOAT16)
        if PAIR:
            gate += _load_bias(gate_section, row, ROWS, COLUMNS, GROUP, STORED, FLOAT16)
    position = first + token
    if INDEXED:
        values = _gated(gate, values, ACTIVATION)
        if is_lattice(TAG):
            values = _rotated(values, row, down_rotation(ROWS, TAG))
    else:
        position = gl.load(index + position, mask=token < count, other=0)
    inside = (token < count) & (row < ROWS)
    gl.store(out + position.to(gl.int64) * ROWS + row, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _row_scales(
    section, row, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TAG: gl.constexpr,
    FLOAT16: gl.constexpr,
):  # fmt: skip
    """Return the float32 scales of a lattice's rows."""
    at = (section + weight_bytes(ROWS, COLUMNS, GROUP, stored_bits(TAG, 0))).to(gl.pointer_type(gl.int32)) + row
    low, high = _unpack_scales(gl.load(at, mask=row < ROWS, other=0), 0, FLOAT16)
    return high if code_bits(TAG) == 4 else low


@gluon.jit
def _rotated(values, row, BLOCK: gl.constexpr):
    """Return the inputs of down, rotated for lattice codes.

    The blocks are those of ``activation.down_inputs``.
    """
    TOKENS: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    LAYOUT: gl.constexpr = values.type.layout
    number = row.to(gl.uint32) * 0x9E3779B1
    number = (number ^ (number >> 15)) * 0x85EBCA77
    values = gl.where(((number ^ (number >> 13)) & 1) == 0, values, -values)
    for power in gl.static_range(0, 6):
        if (2 << power) <= BLOCK:
            pairs = values.reshape([TOKENS, ROWS >> power + 1, 2, 1 << power])
            second = gl.arange(0, 2, only(pairs.type.layout, 2, 4))[None, None, :, None] == 1
            sums = gl.sum(pairs, 2, keep_dims=True)
            differences = gl.sum(gl.where(second, -pairs, pairs), 2, keep_dims=True)
            values = gl.convert_layout(gl.where(second, differences, sums).reshape([TOKENS, ROWS]), LAYOUT)
    return values * (BLOCK**-0.5)


@gluon.jit
def _products(
    gate, up, gate_below, up_below, x, rows, first, count,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TAG: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, INDEXED: gl.constexpr, PAIR: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Products of up to TOKENS positions with four blocks of 64 rows.

    If PAIR, two blocks are of gate, and two of up.

    Args:
        gate, up: int64 addresses of sections; of one section, if not PAIR.
        gate_below, up_below: int64 addresses of residual sections, if there are some.
        x: pointer to activations.
        rows: pointer to their rows' numbers, if INDEXED; otherwise rows are positions.
        first: the first position.
        count: number of positions, from 1 on; what the result says of others means nothing.
        TAG: bits of the codes, or a codebook's tag.

    Others are as in mma_rows.

    Returns:
        float32 [256, TOKENS]; rows are [tile, warp, half, word], see mma_codes.
    """
    FLOAT16: gl.constexpr = x.dtype.element_ty == gl.float16
    DTYPE: gl.constexpr = gl.float16 if FLOAT16 else gl.bfloat16
    BITS: gl.constexpr = code_bits(TAG)
    FLOATS: gl.constexpr = is_float(TAG)
    HALVED: gl.constexpr = 4 if is_lattice(TAG) else NESTED  # bits of codes whose halves lie in two sections
    STORED: gl.constexpr = BITS if FLOATS else stored_bits(BITS, HALVED)
    TWO: gl.constexpr = BITS == 8 or STORED < BITS
    SIZE: gl.constexpr = group_size(TAG, GROUP)
    # At 2 bits a word serves two columns, half of a part apart.
    FOLD: gl.constexpr = 2 if STORED == 2 else 1
    PART: gl.constexpr = 64 if SIZE > 64 and (2 * BITS == HALVED or STORED < BITS) else SIZE
    SPAN: gl.constexpr = PART // FOLD
    BLOCKS: gl.constexpr = (ROWS + 63) // 64
    PADDED_COLUMNS: gl.constexpr = padded_columns(COLUMNS, GROUP, TAG)
    STRIP: gl.constexpr = columns_of_strip(TAG, HALVED, SIZE, PADDED_COLUMNS)
    WORDS: gl.constexpr = STRIP // FOLD
    STRIPS: gl.constexpr = PADDED_COLUMNS // STRIP
    GROUPS: gl.constexpr = STRIP // SIZE if STRIP > SIZE else 1  # in a strip

    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    OF_WORDS: gl.constexpr = word_layout(4, WORDS // 16)
    OF_SCALES: gl.constexpr = scales_layout(GROUPS)
    OF_X: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STRIP, STRIP // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(
        8, 64 // STRIP if STRIP < 64 else 1, STRIP // 8 if STRIP < 64 else 8, order=[1, 0]
    )

    # Words [warp, word, step, lane's column, column].
    warp = gl.arange(0, 4, only(OF_WORDS, 0))[:, None, None, None, None]
    word = gl.arange(0, 8, only(OF_WORDS, 1))[None, :, None, None, None]
    step = gl.arange(0, WORDS // 16, only(OF_WORDS, 2))[None, None, :, None, None]
    lane = gl.arange(0, 4, only(OF_WORDS, 3))[None, None, None, :, None]
    among = gl.arange(0, 4, only(OF_WORDS, 4))[None, None, None, None, :]
    # A lane takes columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: those of its part of the operand.
    column = step * 16 + among // 2 * 8 + lane * 2 + among % 2
    words_at = _blocks(gate, up, warp, BLOCKS, PADDED_COLUMNS * STORED * 8, PAIR).to(gl.pointer_type(gl.int32))
    words_at += column * 8 + word
    below_at = words_at
    if STORED == 8:
        below_at = words_at + PADDED_COLUMNS * 8
    elif TWO:
        below_at = _blocks(gate_below, up_below, warp, BLOCKS, PADDED_COLUMNS * STORED * 8, PAIR)
        below_at = below_at.to(gl.pointer_type(gl.int32)) + (column * 8 + word)

    # Scales [warp, half, word, tile, group].
    s_warp = gl.arange(0, 4, only(OF_SCALES, 0))[:, None, None, None, None]
    s_row = (
        gl.arange(0, 2, only(OF_SCALES, 1))[None, :, None, None, None] * 32
        + gl.arange(0, 8, only(OF_SCALES, 2))[None, None, :, None, None] * 4
        + gl.arange(0, 4, only(OF_SCALES, 3))[None, None, None, :, None]
    )
    if GROUPS > 1:
        s_row += gl.arange(0, GROUPS, only(OF_SCALES, 4))[None, None, None, None, :] * 64
    # Groups of a block of floats are adjacent, as are blocks of a group of integer codes.
    SCALE: gl.constexpr = gl.int32 if not FLOATS else gl.float32 if BITS == 8 else gl.uint8
    APART: gl.constexpr = 64 if FLOATS else BLOCKS * 64
    OF_BLOCK: gl.constexpr = PADDED_COLUMNS // SIZE * 64 * scale_bytes(TAG) if FLOATS else 256
    scales_at = _blocks(gate, up, s_warp, BLOCKS, OF_BLOCK, PAIR)
    scales_at += weight_bytes(ROWS, COLUMNS, GROUP, TAG if FLOATS else STORED)
    scales_at = gl.multiple_of(scales_at.to(gl.pointer_type(SCALE)), [16, 16, 16, 16, 16]) + s_row

    # x [token, column]
    row = gl.minimum(gl.arange(0, TOKENS, gl.SliceLayout(1, OF_X)), count - 1)
    if INDEXED:
        row = gl.load(rows + first + row).to(gl.int32)
    else:
        x += first.to(gl.int64) * COLUMNS
    # Offsets of 32 bits: pointers would take twice as many registers.
    place = gl.arange(0, STRIP, gl.SliceLayout(0, OF_X))[None, :]
    x_at = row[:, None] * COLUMNS
    shared = gl.allocate_shared_memory(DTYPE, [3, TOKENS, STRIP], SHARED)

    sums = gl.zeros([256, TOKENS], gl.float32, layout=MMA)
    words = gl.load(words_at)
    below = words
    if TWO:
        below = gl.load(below_at)
    for strip in gl.static_range(2):
        _copy(shared.index(strip), x, x_at, place, strip, COLUMNS, STRIPS, STRIP, WORDS, SPAN, PART)
    for strip in range(STRIPS):
        # On their way while this strip is computed; the last one is loaded twice.
        following = gl.minimum(strip + 1, STRIPS - 1) * (WORDS * 8)
        next_words = gl.load(words_at + following)
        next_below = next_words
        if TWO:
            next_below = gl.load(below_at + following)
        a = _dequantized(words, below, scales_at, strip, TAG, HALVED, STEPS, SIZE, APART, STRIP, TWO, FOLD, FLOAT16, A)
        async_copy.wait_group(1)
        barrier()
        b = shared.index(strip % 3).permute([1, 0]).load(B)
        sums = mma_v2(a.to(DTYPE, bitcast=True), b, sums)
        _copy(shared.index((strip + 2) % 3), x, x_at, place, strip + 2, COLUMNS, STRIPS, STRIP, WORDS, SPAN, PART)
        words = next_words
        below = next_below
    async_copy.wait_group(0)
    barrier()
    return sums


@gluon.jit
def _blocks(gate, up, warp, BLOCKS: gl.constexpr, BYTES: gl.constexpr, PAIR: gl.constexpr):
    """Return the address of each warp's block, which has BYTES.

    After the last block it is the last one again.
    """
    if PAIR:
        block = gl.minimum(gl.program_id(1) * 2 + warp % 2, BLOCKS - 1)
        return gl.where(warp < 2, gate, up) + block * BYTES
    else:
        return gate + gl.minimum(gl.program_id(1) * 4 + warp, BLOCKS - 1) * BYTES


@gluon.jit
def _copy(
    to, x, x_at, place, strip,
    COLUMNS: gl.constexpr, STRIPS: gl.constexpr, STRIP: gl.constexpr, WORDS: gl.constexpr, SPAN: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Begin to copy x's columns of a strip, zeros after the last column.

    After the last strip it is the last one again.
    """
    strip = gl.minimum(strip, STRIPS - 1)
    column = strip * STRIP + place
    if WORDS < SPAN and WORDS < STRIP:  # a strip has a part of a group's first columns, and as many second ones
        folded = strip * WORDS
        column = folded // SPAN * PART + folded % SPAN + place % WORDS + place // WORDS * SPAN
    if STRIPS * STRIP == COLUMNS:
        _load_shared(to, x + (x_at + column))
    else:
        _load_shared(to, x + (x_at + column), mask=column < COLUMNS)
    async_copy.commit_group()


@gluon.jit
def _as_operand(codes, A: gl.constexpr):
    """Return codes [4, 64, columns] of warps as operand A's tiles [256, columns].

    No code moves to another register.
    """
    COLUMNS: gl.constexpr = codes.shape[2]
    tiles = codes.reshape([4, 4, 16, COLUMNS]).permute([1, 0, 2, 3]).reshape([256, COLUMNS])
    return gl.convert_layout(tiles, A, assert_trivial=True)


@gluon.jit
def _dequantized(
    words, below, scales_at, strip,
    TAG: gl.constexpr, NESTED: gl.constexpr, STEPS: gl.constexpr, SIZE: gl.constexpr, APART: gl.constexpr,
    STRIP: gl.constexpr, TWO: gl.constexpr, FOLD: gl.constexpr, FLOAT16: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Return a strip's weights as 16-bit patterns; of lattice codes their points.

    They are operand A's tiles [256, STRIP].

    Args:
        scales_at: pointers to the scales of the first groups.
        APART: elements from a group's scales to those of the next one.
    """
    WHOLE_BITS: gl.constexpr = 2 * code_bits(TAG) if 2 * code_bits(TAG) == NESTED else code_bits(TAG)
    GROUPS: gl.constexpr = STRIP // SIZE if STRIP > SIZE else 1
    if is_lattice(TAG):
        codes = _as_operand(_operand(words, below, TAG, NESTED, TWO, FOLD, 4, STRIP, FLOAT16), A)
        return gl.inline_asm_elementwise(
            points_of(code_bits(TAG), FLOAT16), "=r,r", [codes], gl.int16, is_pure=True, pack=2
        )
    else:
        if GROUPS > 1:
            scales = gl.load(scales_at + strip * (GROUPS * APART))
        else:
            scales = gl.load(scales_at + strip // (SIZE // STRIP) * APART)
        scale, zero = _scales_zeros(_of_rows(scales, GROUPS, SIZE, A), TAG, FLOAT16)
        scale = _of_columns(scale, STRIP, A)
        zero = _of_columns(zero, STRIP, A)
        if is_float(TAG) or code_bits(TAG) < 8:
            codes = _as_operand(_operand(words, below, TAG, NESTED, TWO, FOLD, 4, STRIP, FLOAT16), A)
            low = codes
        else:
            high, low = _halves(words, below, TAG, NESTED, 4, STRIP, FLOAT16)
            codes = _as_operand(high, A)
            low = _as_operand(low, A)
        return _weights(codes, low, scale, zero, TAG, WHOLE_BITS, STEPS, FLOAT16)


@gluon.jit
def _of_rows(scales, GROUPS: gl.constexpr, SIZE: gl.constexpr, A: gl.constexpr):
    """Return scales [warp, half, word, tile, group] for operand A's rows.

    The result is [256], or [256, GROUPS] of several groups.
    """
    if GROUPS == 1:
        of_rows = scales.permute([3, 0, 1, 2, 4]).reshape([256])
        return gl.convert_layout(of_rows, gl.SliceLayout(1, A), assert_trivial=True)
    else:
        of_rows = scales.permute([3, 0, 1, 2, 4]).reshape([256, GROUPS])
        return gl.convert_layout(of_rows, gl.SliceLayout(2, groups_layout(GROUPS, SIZE)), assert_trivial=True)


@gluon.jit
def _of_columns(scales, STRIP: gl.constexpr, A: gl.constexpr):
    """Return scales of rows, or of rows and groups, for all columns of a strip.

    The result has operand A's tiles [256, STRIP].
    """
    if len(scales.shape) == 1:
        return gl.expand_dims(scales, 1).broadcast_to([256, STRIP])
    else:
        GROUPS: gl.constexpr = scales.shape[1]
        columns = gl.expand_dims(scales, 2).broadcast_to([256, GROUPS, STRIP // GROUPS]).reshape([256, STRIP])
        return gl.convert_layout(columns, A, assert_trivial=True)


@gluon.jit
def _scales_zeros(scales, TAG: gl.constexpr, FLOAT16: gl.constexpr):
    """Return scale and zero as 16-bit patterns.

    Of published floats they are the scale and what rounding takes from it.
    """
    DTYPE: gl.constexpr = gl.float16 if FLOAT16 else gl.bfloat16
    if not is_float(TAG):
        return (scales & 0xFFFF).to(gl.int16), (scales >> 16).to(gl.int16)
    elif code_bits(TAG) == 4:  # exact
        scale = _scale_of_byte(scales.to(gl.int32), TAG).to(DTYPE).to(gl.int16, bitcast=True)
        return scale, scale
    else:
        scale = scales.to(DTYPE)
        rest = (scales - scale.to(gl.float32)).to(DTYPE)
        return scale.to(gl.int16, bitcast=True), rest.to(gl.int16, bitcast=True)


@gluon.jit
def _weights(
    codes, low, scale, zero, TAG: gl.constexpr, WHOLE_BITS: gl.constexpr, STEPS: gl.constexpr, FLOAT16: gl.constexpr
):
    """Return weights as 16-bit patterns; see weights_of.

    Args:
        codes: of integers of 8 bits, the high halves; those have also low ones.
    """
    ASM: gl.constexpr = weights_of(TAG, WHOLE_BITS, STEPS, FLOAT16)
    if is_float(TAG) and code_bits(TAG) == 4:
        return gl.inline_asm_elementwise(ASM, "=r,r,r", [codes, scale], gl.int16, is_pure=True, pack=2)
    elif is_float(TAG) or code_bits(TAG) < 8:
        return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [codes, scale, zero], gl.int16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [codes, scale, zero, low], gl.int16, is_pure=True, pack=2)


@gluon.constexpr_function
def weights_of(tag, whole_bits, integer_zeros, float16):
    """Return PTX for two weights from operands of their codes, scales and zeros.

    A float's level times a scale of 4 bits is exact, and what a float32 scale loses in 16 bits is added before the
    weight is rounded. The code less its center is exact in 16 bits, and so it is with an integer zero. What follows is
    rounded once.
    """
    bits, fma = code_bits(tag), "fma.rn.f16x2" if float16 else "fma.rn.bf16x2"
    if is_float(tag):
        lines = ["mov.b32 %rest, 0x80008000;"]  # -0.0
        if bits == 8:
            lines += [f"{fma} %rest, $1, $3, %rest;"]
        return "{\n.reg .b32 %rest;\n" + "\n".join([*lines, f"{fma} $0, $1, $2, %rest;"]) + "\n}"
    step = 1 << (whole_bits - bits)
    center, offset = (1 << (whole_bits - 1)) - (step - 1) / 2, offset_of(bits, float16)
    numbers = {"%one": 1, "%step": step, "%center": -center, "%offset": -offset - center * (step == 1)}
    lines = [f"mov.b32 {name}, {_twice(number, float16)};" for name, number in numbers.items()]
    lines += [f"{fma} %code, $1, %one, %offset;"]
    if bits == 8:  # the halves' sum less the center
        lines += [f"{fma} %code, $4, %one, %code;"]
    if step > 1:
        lines += [f"{fma} %code, %code, %step, %center;"]
    if integer_zeros:
        lines += [f"{fma} %code, %code, %one, $3;", "mov.b32 %offset, 0x80008000;", f"{fma} $0, %code, $2, %offset;"]
    else:
        lines += [f"{fma} $0, %code, $2, $3;"]
    return "{\n.reg .b32 %code, " + ", ".join(numbers) + ";\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def points_of(bits, float16):
    """Return PTX for the numbers of two lattice points from their operands.

    See ``mma_codes.lattice_codes``.
    """
    step, center = (0.125, -1.5625 - 0.625) if bits == 4 else (0.5, -1.25 - 0.5)
    fma, numbers = "fma.rn.f16x2" if float16 else "fma.rn.bf16x2", (1, -offset_of(4, float16), step, center)
    one, offset, step, center = (_twice(number, float16) for number in numbers)
    lines = [f"mov.b32 %a, {one};", f"mov.b32 %b, {offset};", f"{fma} %point, $1, %a, %b;"]
    lines += [f"mov.b32 %a, {step};", f"mov.b32 %b, {center};", f"{fma} $0, %point, %a, %b;"]
    return "{\n.reg .b32 %a, %b, %point;\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _twice(number, float16):
    """Return a literal with a number's 16 bits in both halves; the number is not 0.

    ValueError if 16 bits do not hold it.
    """
    bits, exponent, mantissa = (10, 15, abs(number)) if float16 else (7, 127, abs(number))
    while mantissa >= 2:
        mantissa, exponent = mantissa / 2, exponent + 1
    while mantissa < 1:
        mantissa, exponent = mantissa * 2, exponent - 1
    fraction = (mantissa - 1) * 2**bits
    if fraction != int(fraction) or fraction < 0:
        raise ValueError(f"16 bits do not hold {number}")
    held = (number < 0) << 15 | exponent << bits | int(fraction)
    return hex(held * 0x10001)


@gluon.constexpr_function
def columns_of_strip(tag, nested, group, columns):
    """Return the columns that programs dequantize between two barriers.

    Codes of 8 bits are two words, so that half as many columns take as many registers.

    Args:
        group: columns that share a scale.
        columns: stored ones, of which the result is a part.
    """
    if code_bits(tag) == 8:
        return min(group, 32)
    if is_float(tag):
        return next(size for size in (64, 32, 16) if columns % size == 0)
    return strip_columns(tag, nested, group)


@gluon.constexpr_function
def scales_layout(groups):
    """Return the layout of scales [warp, half, word, tile, group].

    A lane loads those of four tiles together.
    """
    more = [[0, 0, 0, 0, bit] for bit in (1, 2) if bit < groups]
    registers = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], *more]
    lanes = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    warps = [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 2, 8, 4, groups])


@gluon.constexpr_function
def groups_layout(groups, size):
    """Return operand A's layout, as one of [256, groups, size of a group]."""
    more = [*([0, 0, bit] for bit in (16, 32) if bit < size), *([0, bit, 0] for bit in (1, 2) if bit < groups)]
    registers = [[0, 0, 1], [8, 0, 0], [0, 0, 8], *more, [64, 0, 0], [128, 0, 0]]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [256, groups, size])


@gluon.constexpr_function
def output_layout(tokens, pair):
    """Return the layout of results [tokens, 256 rows].

    A lane has four neighbouring rows of a token; if `pair`, of gate and of up.
    """
    half, projection = [0, 32], [0, 128]
    more = [[bit, 0] for bit in (8, 16, 32) if bit < tokens]
    registers = [[0, 1], [0, 2], projection if pair else half, [1, 0], *more]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 64], half if pair else projection], [], [tokens, 256])
