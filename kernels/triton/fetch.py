"""Fetch-through: a program copies its share of a section and uses the copy.

It copies to a second address, and computes from there. The first address may be mapped host memory. Its bytes cross
the link once, in 16-byte loads per thread; the products then read them from the slot, out of the cache where they were
just written. The result has the bits of a launch from the slot, and no second copy is needed.

A share is what one program computes from: one of SPLIT parts of the columns of a block of 64 rows (``rows`` divides
them), with weights, scales and zeros. The first part includes the bias and the section's padding. All shares together
are the section. A column order, a factor, or a lattice's scales belong to several shares: each program fetches them
before it computes, and all store the same bytes.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.section import (
    TAG_BITS,
    bias_offset,
    code_bits,
    factor_bytes,
    group_size,
    is_float,
    is_lattice,
    order_offset,
    padded_columns,
    scale_bytes,
    stored_bits,
    strip_columns,
    weight_bytes,
)


@triton.jit
def fetch_share(
    source,
    destination,
    bits,
    block,
    split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Copy one program's share of a section.

    A barrier must follow before another thread reads it.

    Args:
        source: int64 address of the section.
        destination: int64 address of its copy, a multiple of 16.
        bits: int32, one of the widths whose sum is PRECISIONS, or the tag of a codebook among them.
        block: index of the 64 rows.
        split: index of the part of the columns.
        NESTED: bits of the codes whose base slices are in the section, half as many bits each.
    """
    for width in tl.static_range(1, TAG_BITS):
        if PRECISIONS & (1 << width):
            if bits == (1 << width):
                if width == 4:
                    _fetch_plain(source, destination, block, split, ROWS, COLUMNS, SPLIT, WARPS)
                elif is_float(1 << width):
                    _fetch_floats(source, destination, block, split, ROWS, COLUMNS, GROUP, 1 << width, SPLIT, WARPS)
                else:
                    _fetch_quantized(
                        source, destination, block, split,
                        ROWS, COLUMNS, GROUP, code_bits(1 << width), 4 if is_lattice(1 << width) else NESTED,
                        ORDERED >> width & 1, BIAS, is_lattice(1 << width), SPLIT, WARPS,
                    )  # fmt: skip
                if BIAS:
                    if split == 0:
                        _fetch_bias(source, destination, block, ROWS, COLUMNS, GROUP, stored_bits(1 << width, NESTED))


@triton.jit
def fetch_residual(
    source, destination, block, split,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, NESTED: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Copy one program's share of a residual section.

    ``fetch_share`` does this for other sections.
    """
    PADDED_COLUMNS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * GROUP
    STRIP: tl.constexpr = strip_columns(NESTED, NESTED, GROUP)
    STRIPS: tl.constexpr = PADDED_COLUMNS // STRIP
    SHARE: tl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, STRIPS)
    BYTES: tl.constexpr = STRIP * NESTED * 4
    first = block.to(tl.int64) * (STRIPS * BYTES) + begin * BYTES
    _copy(source + first, destination + first, (end - begin) * (BYTES // 4))


@triton.jit
def _fetch_plain(
    source, destination, block, split,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Copy 16-bit weights.

    Columns are stored one after the other; a share is a piece of each.
    """
    WIDTH: tl.constexpr = 32 * WARPS
    SHARE: tl.constexpr = (COLUMNS + WIDTH * SPLIT - 1) // (WIDTH * SPLIT) * WIDTH
    source_halves = source.to(tl.pointer_type(tl.int16))
    destination_halves = destination.to(tl.pointer_type(tl.int16))
    row = tl.arange(0, 32)[:, None]
    for number in range(split * SHARE // 128, (tl.minimum((split + 1) * SHARE, COLUMNS) + 127) // 128):
        column = number * 128 + tl.arange(0, 128)[None, :]
        for half in range(2):
            at_row = block * 64 + half * 32 + row
            offset = at_row.to(tl.int64) * COLUMNS + column
            if COLUMNS % 8 == 0:
                offset = tl.multiple_of(offset, [1, 8])
            inside = (at_row < ROWS) & (column < COLUMNS)
            values = tl.load(tl.multiple_of(source_halves, 16) + offset, mask=inside)
            tl.store(tl.multiple_of(destination_halves, 16) + offset, values, mask=inside)
    if (split == 0) & (block == (ROWS + 63) // 64 - 1):
        padding = ROWS * COLUMNS + tl.arange(0, 128)
        inside = padding < weight_bytes(ROWS, COLUMNS, 64, 16) // 2
        tl.store(destination_halves + padding, tl.load(source_halves + padding, mask=inside), mask=inside)


@triton.jit
def _fetch_quantized(
    source, destination, block, split,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NESTED: tl.constexpr,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, LATTICE: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Copy codes of whole strips of whole groups.

    They take four bytes per bit and column, at 8 bits half of them per plane.
    """
    PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
    PADDED_COLUMNS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * GROUP
    STORED: tl.constexpr = stored_bits(BITS, NESTED)
    STRIP: tl.constexpr = strip_columns(BITS, NESTED, GROUP)
    STRIPS: tl.constexpr = PADDED_COLUMNS // STRIP
    SHARE: tl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, STRIPS)
    _copy_codes(source, destination, block, begin * STRIP, end * STRIP, PADDED_COLUMNS, STORED)
    # 256 bytes for each group; a lattice has one group, whose scales every part fetches.
    first_group = begin * (0 if LATTICE else STRIP) // GROUP
    last_group = first_group + 1 if LATTICE else end * STRIP // GROUP
    first = weight_bytes(ROWS, COLUMNS, GROUP, STORED) + block.to(tl.int64) * 256
    source_words = tl.multiple_of((source + first).to(tl.pointer_type(tl.int32)), 16)
    destination_words = tl.multiple_of((destination + first).to(tl.pointer_type(tl.int32)), 16)
    words = tl.arange(0, 1024)
    at = words // 64 * PADDED_ROWS + words % 64
    for group in range(first_group, last_group, 16):
        offset = group * PADDED_ROWS + at
        inside = group + words // 64 < last_group
        tl.store(destination_words + offset, tl.load(source_words + offset, mask=inside), mask=inside)
    if ORDERED:
        first = order_offset(ROWS, COLUMNS, GROUP, STORED, BIAS)
        part = first + first_group.to(tl.int64) * (2 * GROUP)
        _copy(source + part, destination + part, (last_group - first_group) * (GROUP // 2))
        if split == 0:
            BYTES: tl.constexpr = (2 * PADDED_COLUMNS + 255) // 256 * 256
            _copy(
                source + first + 2 * PADDED_COLUMNS,
                destination + first + 2 * PADDED_COLUMNS,
                (BYTES - 2 * PADDED_COLUMNS) // 4,
            )


@triton.jit
def _fetch_floats(
    source, destination, block, split,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Copy published floats.

    These are the strips of ``float_rows``, every scale that one of them needs, and the factor.
    """
    SIZE: tl.constexpr = group_size(TAG, GROUP)
    STRIP: tl.constexpr = 32 if SIZE > 32 else SIZE
    PADDED_COLUMNS: tl.constexpr = padded_columns(COLUMNS, GROUP, TAG)
    STRIPS: tl.constexpr = PADDED_COLUMNS // STRIP
    SHARE: tl.constexpr = (STRIPS + SPLIT * WARPS - 1) // (SPLIT * WARPS) * WARPS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, STRIPS)
    _copy_codes(source, destination, block, begin * STRIP, end * STRIP, PADDED_COLUMNS, code_bits(TAG))
    # Scales of a block are adjacent. Two parts may meet inside a group: both fetch its scales.
    BYTES: tl.constexpr = 64 * scale_bytes(TAG)
    SCALES: tl.constexpr = weight_bytes(ROWS, COLUMNS, GROUP, TAG)
    GROUPS: tl.constexpr = PADDED_COLUMNS // SIZE
    first_group = begin * STRIP // SIZE
    last_group = (end * STRIP + SIZE - 1) // SIZE
    first = SCALES + (block.to(tl.int64) * GROUPS + first_group) * BYTES
    _copy(source + first, destination + first, (last_group - first_group) * (BYTES // 4))
    FACTOR: tl.constexpr = factor_bytes(TAG)
    FACTOR_AT: tl.constexpr = bias_offset(ROWS, COLUMNS, GROUP, TAG) - FACTOR
    if FACTOR > 0:
        _copy(source + FACTOR_AT, destination + FACTOR_AT, FACTOR // 4)
    BLOCKS: tl.constexpr = (ROWS + 63) // 64
    if (split == 0) & (block == BLOCKS - 1):
        PADDING: tl.constexpr = SCALES + BLOCKS * GROUPS * BYTES
        _copy(source + PADDING, destination + PADDING, (FACTOR_AT - PADDING) // 4)


@triton.jit
def _copy_codes(source, destination, block, begin, end, PADDED_COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """Copy the codes of some columns, a multiple of eight; in both planes at 8 bits."""
    PLANES: tl.constexpr = 2 if BITS == 8 else 1
    for plane in tl.static_range(PLANES):
        first = block.to(tl.int64) * (8 * PADDED_COLUMNS * BITS) + plane * 32 * PADDED_COLUMNS
        first += begin * (8 * BITS // PLANES)
        _copy(source + first, destination + first, (end - begin) * (2 * BITS // PLANES))


@triton.jit
def _fetch_bias(
    source, destination, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr
):
    stored: tl.constexpr = ROWS if BITS == 16 else (ROWS + 63) // 64 * 64
    BYTES: tl.constexpr = (2 * stored + 255) // 256 * 256
    first = bias_offset(ROWS, COLUMNS, GROUP, BITS)
    begin = block.to(tl.int64) * 128
    end = tl.where(block == (ROWS + 63) // 64 - 1, BYTES, begin + 128)
    _copy(source + first + begin, destination + first + begin, (end - begin) // 4)


@triton.jit
def _copy(source, destination, words):
    """Copy int32 words between addresses that are multiples of 16.

    The number of words is a multiple of four.
    """
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    destination_words = tl.multiple_of(destination.to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(tl.cast(words, tl.int32), 4)
    for first in range(0, words, 2048):
        offset = first + tl.arange(0, 2048)
        values = tl.load(source_words + offset, mask=offset < words)
        tl.store(destination_words + offset, values, mask=offset < words)
