"""Fetch-through: a program copies its share of a section to a second address, and computes from the copy.

The first address may be mapped host memory. Its bytes cross the link once, in
loads of 16 bytes for each thread; the products then read them from the slot, out
of the cache where they just went. So the result is that of a launch from the slot,
bit for bit, and no second copy is needed.

A share is what belongs to one block of 64 rows: its weights, its scales and zeros, its
part of the bias, and for the last block the bytes that pad. All shares together
are the section. An order of columns, or a factor, belongs to every block: each fetches it,
before it computes, and stores the same bytes as the others.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.section import (
    bias_offset,
    code_bits,
    factor_bytes,
    group_size,
    order_offset,
    padded_columns,
    scale_bytes,
    weight_bytes,
)


@triton.jit
def fetch_share(
    source,
    destination,
    bits,
    block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TIERS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Copy one block's share of a section. A barrier has to follow before another thread reads it.

    Args:
        source: int64 address of the section.
        destination: int64 address of its copy, a multiple of 16.
        bits: int32, one of the widths whose sum is TIERS.
        block: which 64 rows.
    """
    for width in tl.static_range(1, 8):
        if TIERS & (1 << width):
            if bits == (1 << width):
                _fetch(source, destination, block, ROWS, COLUMNS, GROUP, 1 << width, ORDERED >> width & 1, BIAS)


@triton.jit
def _fetch(
    source,
    destination,
    block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
):
    PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
    PADDED_COLUMNS: tl.constexpr = padded_columns(COLUMNS, GROUP, BITS)
    BLOCKS: tl.constexpr = PADDED_ROWS // 64
    block_bytes = 128 * COLUMNS if BITS == 16 else 8 * PADDED_COLUMNS * code_bits(BITS)
    begin = block.to(tl.int64) * block_bytes
    # The last block of 16 bits has fewer rows, and the padding behind them.
    end = tl.where(block == BLOCKS - 1, weight_bytes(ROWS, COLUMNS, GROUP, BITS), begin + block_bytes)
    _copy(source + begin, destination + begin, (end - begin) // 4)
    if BITS < 16:
        # 256 bytes for each group.
        begin = weight_bytes(ROWS, COLUMNS, GROUP, BITS) + block.to(tl.int64) * 256
        words = tl.arange(0, 1024)
        at = words // 64 * PADDED_ROWS + words % 64
        GROUPS: tl.constexpr = PADDED_COLUMNS // GROUP
        source_words = tl.multiple_of((source + begin).to(tl.pointer_type(tl.int32)), 16)
        destination_words = tl.multiple_of((destination + begin).to(tl.pointer_type(tl.int32)), 16)
        for first in range(0, GROUPS, 16):
            offset = first * PADDED_ROWS + at
            inside = first + words // 64 < GROUPS
            values = tl.load(source_words + offset, mask=inside)
            tl.store(destination_words + offset, values, mask=inside)
    if BITS > 16:
        # Scales of a block lie together; the last one's padding, and the factor, behind them.
        SHARE: tl.constexpr = PADDED_COLUMNS // group_size(BITS, GROUP) * 64 * scale_bytes(BITS)
        FACTOR: tl.constexpr = factor_bytes(BITS)
        FACTOR_AT: tl.constexpr = bias_offset(ROWS, COLUMNS, GROUP, BITS) - FACTOR
        begin = weight_bytes(ROWS, COLUMNS, GROUP, BITS) + block.to(tl.int64) * SHARE
        end = tl.where(block == BLOCKS - 1, FACTOR_AT, begin + SHARE)
        _copy(source + begin, destination + begin, (end - begin) // 4)
        if FACTOR > 0:
            _copy(source + FACTOR_AT, destination + FACTOR_AT, FACTOR // 4)
    if BIAS:
        stored: tl.constexpr = ROWS if BITS == 16 else PADDED_ROWS
        BIAS_BYTES: tl.constexpr = (2 * stored + 255) // 256 * 256
        begin = bias_offset(ROWS, COLUMNS, GROUP, BITS) + block.to(tl.int64) * 128
        end = tl.where(block == BLOCKS - 1, bias_offset(ROWS, COLUMNS, GROUP, BITS) + BIAS_BYTES, begin + 128)
        _copy(source + begin, destination + begin, (end - begin) // 4)
    if ORDERED:
        ORDER_BYTES: tl.constexpr = (2 * PADDED_COLUMNS + 255) // 256 * 256
        begin = order_offset(ROWS, COLUMNS, GROUP, BITS, BIAS)
        _copy(source + begin, destination + begin, ORDER_BYTES // 4)


@triton.jit
def _copy(source, destination, words):
    """Copy int32 words, a multiple of four, between addresses that are multiples of 16."""
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    destination_words = tl.multiple_of(destination.to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(tl.cast(words, tl.int32), 4)
    for first in range(0, words, 2048):
        offset = first + tl.arange(0, 2048)
        values = tl.load(source_words + offset, mask=offset < words)
        tl.store(destination_words + offset, values, mask=offset < words)
