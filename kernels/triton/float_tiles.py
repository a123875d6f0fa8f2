"""Tiles of published floats for tensor cores.

This is like grouped.load_weights for other encodings.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.float_rows import scale_of_byte
from vllm_dymoe.kernels.triton.section import code_bits, group_size, padded_columns, weight_bytes


@triton.jit
def load_floats(
    section, tile, start,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FLOAT16: tl.constexpr,
):  # fmt: skip
    """Return a tile [BLOCK_K, BLOCK_N] of a transposed weight.

    It is zero after the last stored row or column. At 4 bits the tile holds levels times scales, exactly (within the
    range of the dtype); for FP8 the levels alone.

    Args:
        TAG: of the codebook.
    """
    dtype: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    BITS: tl.constexpr = code_bits(TAG)
    SIZE: tl.constexpr = group_size(TAG, GROUP)
    PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
    PADDED_COLUMNS: tl.constexpr = padded_columns(COLUMNS, GROUP, TAG)
    BLOCKS: tl.constexpr = BLOCK_N // 64
    WHOLE: tl.constexpr = PADDED_ROWS % BLOCK_N == 0 and PADDED_COLUMNS % BLOCK_K == 0
    column = start + tl.arange(0, BLOCK_K)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    base = tl.multiple_of(section.to(tl.pointer_type(tl.int32)), 16)
    pointers = base + block * (PADDED_COLUMNS * BITS * 2) + column[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    valid = (block < PADDED_ROWS // 64) & (column < PADDED_COLUMNS)[:, None, None]
    half = tl.arange(0, 2)[None, None, :, None, None]
    byte = tl.arange(0, 4)[None, None, None, None, :]
    shift = 8 * byte + 4 * half
    words = tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid, other=0)
    codes = (words[:, :, None, :, None] >> shift) & 15
    if BITS == 8:
        pointers += PADDED_COLUMNS * 8
        below = tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid, other=0)
        codes = (codes << 4) | ((below[:, :, None, :, None] >> shift) & 15)
        floats = (((codes & 128) << 24) | ((codes & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        return floats.reshape(BLOCK_K, BLOCK_N).to(dtype)
    else:
        floats = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        group = row // 64 * (PADDED_COLUMNS // SIZE)
        scales_at = (section + weight_bytes(ROWS, COLUMNS, GROUP, TAG)).to(tl.pointer_type(tl.uint8))
        scales_at = scales_at + (group[None, :] + (column // SIZE)[:, None]) * 64 + (row % 64)[None, :]
        inside = (row < PADDED_ROWS)[None, :] & (column < PADDED_COLUMNS)[:, None]
        scales = tl.load(scales_at) if WHOLE else tl.load(scales_at, mask=inside, other=0)
        return (floats.reshape(BLOCK_K, BLOCK_N) * scale_of_byte(scales.to(tl.int32), TAG)).to(dtype)


@triton.jit
def load_row_scales(
    section, tile, start,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAG: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return FP8 scales of BLOCK_N rows for the group of a column.

    They are float32 [BLOCK_N], zero after the last row.
    """
    PADDED_ROWS: tl.constexpr = (ROWS + 63) // 64 * 64
    GROUPS: tl.constexpr = padded_columns(COLUMNS, GROUP, TAG) // GROUP
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    scales_at = (section + weight_bytes(ROWS, COLUMNS, GROUP, TAG)).to(tl.pointer_type(tl.float32))
    pointers = scales_at + (row // 64 * GROUPS + start // GROUP) * 64 + row % 64
    return tl.load(pointers, mask=row < PADDED_ROWS, other=0)
