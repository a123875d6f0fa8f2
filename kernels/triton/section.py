"""Offsets inside a section, for kernels.

These are device functions for the formulas of docs/format.md. Sizes are compile-time constants, so every offset except
the block's and the group's is folded.
"""

import triton
import triton.language as tl

from vllm_dymoe.experts.encoding import E8, E8_NESTED, WHOLE

DESCRIPTIONS = [
    "addresses", "destinations", "residual", "residual_destinations", "bits", "items", "rows", "pairs", "weights",
    "computed",
]  # fmt: skip
"""Arguments with arbitrary alignment: no kernel is compiled again because one of them is a slice of a tensor."""

TAG_BITS = tl.constexpr(max(WHOLE).bit_length())
"""Powers of two from 2 up to below 2 ** TAG_BITS are encodings' tags; those from 32 on have a register of their own."""


@triton.constexpr_function
def code_bits(tag):
    """Return the bits of a code."""
    return WHOLE[tag].bits


@triton.constexpr_function
def group_size(tag, group):
    """Return the number of columns that share a scale, or are padded together.

    It is the encoding's own, or the table's.
    """
    return WHOLE[tag].group_size or group


@triton.constexpr_function
def scale_bytes(tag):
    """Return the bytes per row and group.

    They hold scale and zero, or a published float's scale.
    """
    dtype = WHOLE[tag].scale_dtype
    return 4 if dtype is None else dtype.itemsize


@triton.constexpr_function
def factor_bytes(tag):
    """Return the bytes before the bias that hold a matrix's factor."""
    return 256 if WHOLE[tag].has_factor else 0


@triton.constexpr_function
def padded_columns(columns, group, tag):
    """Return the number of stored columns."""
    size = WHOLE[tag].group_size or group
    return -(-columns // size) * size


@triton.constexpr_function
def is_lattice(tag):
    """Return whether codes are lattice points."""
    return WHOLE[tag].lattice


@triton.constexpr_function
def is_float(tag):
    """Return whether codes are published floats."""
    return WHOLE[tag].floats


@triton.constexpr_function
def down_rotation(rows, precisions):
    """Return the block size of down's input rotation, 0 if no precision is a lattice."""
    return min(rows & -rows, 64) if precisions & (E8.tag | E8_NESTED.tag) else 0


@triton.constexpr_function
def stored_bits(bits, nested):
    """Return the bits or tag of a matrix's first section.

    Codes of `nested` bits are stored in two sections.
    """
    if WHOLE[bits].lattice:
        return E8.tag
    return bits // 2 if bits == nested else bits


@triton.constexpr_function
def strip_columns(bits, nested, group):
    """Return the columns of one group that a warp owns at a time.

    They are the same for base slices as for whole codes.
    """
    return min(group, 128 if bits == 2 and nested != 4 else 64)


@triton.constexpr_function
def weight_bytes(rows, columns, group, tag):
    """Return the bytes of a section before its scales, a multiple of 256."""
    if tag == 16:
        return -(-2 * rows * columns // 256) * 256
    return -(-rows // 64) * 64 * padded_columns(columns, group, tag) * code_bits(tag) // 8


@triton.constexpr_function
def bias_offset(rows, columns, group, tag):
    """Return the byte of a section where its bias begins.

    Without a bias it is where the section ends.
    """
    if tag == 16:
        return weight_bytes(rows, columns, group, tag)
    padded = -(-rows // 64) * 64 * padded_columns(columns, group, tag)
    groups = 1 if WHOLE[tag].lattice else padded_columns(columns, group, tag) // group_size(tag, group)
    scales = -(-rows // 64) * 64 * groups * scale_bytes(tag)
    return padded * code_bits(tag) // 8 + -(-scales // 256) * 256 + factor_bytes(tag)


@triton.constexpr_function
def order_offset(rows, columns, group, tag, bias):
    """Return the byte of a section where its column order begins.

    Without an order it is where the section ends.
    """
    bias_bytes = -(-(-(-rows // 64) * 128) // 256) * 256 if bias else 0
    return bias_offset(rows, columns, group, tag) + bias_bytes


@triton.jit
def unpack_scales(words, STEPS: tl.constexpr, FLOAT16: tl.constexpr):
    """Return scale and zero, float32, from int32 words with 16 bits of each.

    STEPS: zeros count steps of the scale.
    """
    if FLOAT16:
        scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # A bfloat16 is the upper half of a float32.
        scale = (words << 16).to(tl.float32, bitcast=True)
        zero = (words & -65536).to(tl.float32, bitcast=True)
    if STEPS:
        zero = zero * scale  # exact: a product of two numbers of at most 11 bits
    return scale, zero


@triton.jit
def load_bias(
    section,
    rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT16: tl.constexpr,
):
    """Load float32 biases of some rows, zero after the last one.

    Args:
        section: int64 address of the section.
        rows: int32, any shape.
    """
    dtype: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    address = section + bias_offset(ROWS, COLUMNS, GROUP, BITS)
    return tl.load(address.to(tl.pointer_type(dtype)) + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
