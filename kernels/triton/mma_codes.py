"""Codes of a packed word as operands of `mma.m16n8k16`, in PTX.

The layouts here make this free.

A word of a column holds eight codes of four bits: byte i has the rows 4 w + i (low four bits) and 32 + 4 w + i (high
four bits) of a block of 64. In operand A of `mma.m16n8k16` lane (g, t) holds rows g and g + 8, and columns 2 t,
2 t + 1, 2 t + 8 and 2 t + 9. So a lane that loads word g of the columns t, t + 4, t + 8 and t + 12 has its part of four
tiles i of 16 rows, because the order of columns in a sum is free as long as x has the same one:

    tile i, row 8 h + g       is row 32 h + 4 g + i of the block
    mma column 8 a + 2 t + b  is column 4 (2 a + b) + t of 16 stored ones

Two byte permutes pair neighbouring columns, and one AND-OR puts two codes into the mantissas of 128.0 (bfloat16) or
1024.0 (float16), which then are exactly 128 + code. What this adds to a product is known from the sum of x.
"""

import triton
from triton.experimental.gluon import language as gl

from vllm_dymoe.kernels.triton.section import code_bits, is_float, is_lattice, stored_bits


@triton.constexpr_function
def offset_of(bits, float16):
    """Return what operands of integer codes are larger than their codes."""
    one = 1024 if float16 else 128
    return one + 16 * one if bits == 8 else one


@triton.constexpr_function
def constraints(tensors, sections):
    """Return constraints of the inline PTX.

    They are two registers of each result, and the words of four columns.
    """
    return ",".join(["=&r"] * (2 * tensors) + ["r"] * (4 * sections))


@triton.constexpr_function
def codes_of(tag, nested, float16):
    """Return the PTX for a matrix's codes, by its tag.

    See section.stored_bits for `nested`.
    """
    bits = code_bits(tag)
    if is_lattice(tag):
        return lattice_codes(bits == 4, float16)
    if is_float(tag):
        return float_codes(bits, float16)
    return affine_codes(bits, stored_bits(bits, nested), float16)


@triton.constexpr_function
def affine_codes(bits, stored, float16):
    """Return PTX that turns four columns' words of integer codes into operands.

    Outputs are pairs of registers, of columns 0 and 1, and 2 and 3, for each tile and half; of codes of 2 bits, for a
    word's first columns and then for its second ones; of 8 bits, of the high and then of the low halves.
    """
    two = bits == 8 or stored < bits
    level = 0x64006400 if float16 else 0x43004300  # 1024.0 or 128.0, twice
    level_16 = 0x74007400 if float16 else 0x45004500  # the same where the last bit of a mantissa counts 16
    select = "0xCCCCCCCC, 0xE4"  # the bits of a where the mask is set, else those of b
    first, second = _inputs(32 if two or stored == 2 else 16)
    lines = []
    if bits == 8:
        lines += _integers(first, 0, 15, 0, level_16) + _integers(second, 16, 15, 0, level)
    elif stored == 4:
        lines += _integers(first, 0, 15, 0, level)
    elif two:  # two bits of each, in a word of four-bit codes for each of a word's two columns
        for m in range(4):
            lines += [
                f"shl.b32 %mq, {first[m]}, 2;", f"lop3.b32 %mu{m}, %mq, {second[m]}, {select};",
                f"shr.b32 %mq, {second[m]}, 2;", f"lop3.b32 %mv{m}, {first[m]}, %mq, {select};",
            ]  # fmt: skip
        for part, words in enumerate("uv"):
            lines += _integers([f"%m{words}{m}" for m in range(4)], 16 * part, 15, 0, level)
    else:
        lines += _integers(first, 0, 3, 0, level) + _integers(first, 16, 3, 2, level)
    return _block(lines)


@triton.constexpr_function
def float_codes(bits, float16):
    """Return PTX that turns words of published float codes into their levels.

    Codes are e2m1 of 4 bits, or e4m3 of 8 bits whose halves are two words. A code's bits at the sign, the last
    exponent bits and the first bits of the mantissa are its level times a power of two, also where code and number are
    subnormal. One product, which is exact, takes the power away.
    """
    at = (9 if bits == 4 else 7) if float16 else (6 if bits == 4 else 4)  # of the code's last bit
    power = {(4, False): 0x7E80, (8, False): 0x7B80, (4, True): 0x7400, (8, True): 0x5C00}[bits, float16]
    kind = "f16x2" if float16 else "bf16x2"
    first, second = _inputs(16)
    lines = [f"mov.b32 %mu0, {power * 0x10001:#x};", "mov.b32 %mu1, 0x80008000;"]  # the power, and -0.0
    lines += _pairs(first, "p") + (_pairs(second, "r") if bits == 8 else [])
    for out, pair, place in _places(0):
        lines += _moved("%mq", f"%mp{pair}", place, 12) + ["and.b32 %mq, %mq, 0x80008000;"]
        rest = [(f"%mp{pair}", at + 4, 7), (f"%mr{pair}", at, 15)] if bits == 8 else [(f"%mp{pair}", at, 7)]
        for register, to, mask in rest:
            lines += _moved("%ms", register, place, to)
            lines += [f"lop3.b32 %mq, %ms, {(mask << to) * 0x10001:#x}, %mq, 0xEA;"]
        lines += [f"fma.rn.{kind} {out}, %mq, %mu0, %mu1;"]
    return _block(lines)


@triton.constexpr_function
def lattice_codes(nested, float16):
    """Return PTX that turns words of lattice points into operands.

    They are 2 c + 1 - p for a code c whose point's codes have parity p, above the offset. With a second section, eight
    times the number's sum: 4 (2 c + 1 - p) + 2 c' + 1 - p'.
    """
    level, lines = 0x64006400 if float16 else 0x43004300, []
    words = dict(zip("pr", _inputs(32), strict=True)) if nested else {"p": _inputs(32)[0]}
    for second in range(2):  # of a word's two columns
        for name, section in words.items():
            lines += _pairs(section, name)
            for pair in range(2):
                lines += _parities(section[2 * pair : 2 * pair + 2], second, f"%m{'uv'[name == 'r']}{pair}")
                coarse = nested and name == "p"
                if coarse:
                    lines.append(f"shl.b32 %mu{pair}, %mu{pair}, 2;")
                if name == "p":
                    lines.append(f"or.b32 %mu{pair}, %mu{pair}, {level:#x};")
        for out, pair, place in _places(16 * second):
            to = 3 if nested else 1
            lines += _moved("%mq", f"%mp{pair}", place + 2 * second, to)
            lines.append(f"lop3.b32 %mq, %mq, {(3 << to) * 0x10001:#x}, %mu{pair % 2}, 0xEA;")
            if nested:
                lines += _moved("%ms", f"%mr{pair}", place + 2 * second, 1)
                lines += [f"lop3.b32 %ms, %ms, 0x60006, %mv{pair % 2}, 0xEA;", f"add.u32 {out}, %mq, %ms;"]
            else:
                lines.append(f"mov.b32 {out}, %mq;")
    return _block(lines)


@triton.constexpr_function
def _inputs(outputs):
    """Return the operands that hold the words of four columns.

    Those of the first section come first, then those of the second.
    """
    return [[f"${outputs + 4 * part + m}" for m in range(4)] for part in range(2)]


@triton.constexpr_function
def _integers(words, to, mask, shift, level):
    """Return PTX for four words' codes under a mask.

    The mask is `shift` bits above the lowest of each nibble.
    """
    lines = _pairs(words, "p")
    for out, pair, place in _places(to):
        lines += _moved("%mq", f"%mp{pair}", place + shift, 0)
        lines.append(f"lop3.b32 {out}, %mq, {mask * 0x10001:#x}, {level:#x}, 0xEA;")  # (a & b) | c
    return lines


@triton.constexpr_function
def _pairs(words, name):
    """Return PTX that pairs bytes of neighbouring columns.

    It pairs bytes 0 and 1, then 2 and 3, of columns 0 and 1, and of columns 2 and 3.
    """
    return [
        f"prmt.b32 %m{name}{2 * upper + later}, {words[2 * later]}, {words[2 * later + 1]}, {selected};"
        for upper, selected in enumerate(("0x5410", "0x7632"))
        for later in range(2)
    ]


@triton.constexpr_function
def _places(to):
    """Return each output from `to` on, its pair, and where its nibble begins.

    The place is the bit where the nibble begins in both 16-bit halves.
    """
    return [
        (f"${to + 4 * tile + 2 * half + later}", 2 * (tile >> 1) + later, 8 * (tile & 1) + 4 * half)
        for tile in range(4)
        for half in range(2)
        for later in range(2)
    ]


@triton.constexpr_function
def _moved(out, register, place, to):
    """Return PTX that moves a bit from one place to another.

    ptxas drops a move by nothing.
    """
    by = place - to
    return [f"sh{'r' if by > 0 else 'l'}.b32 {out}, {register}, {abs(by)};" if by else f"mov.b32 {out}, {register};"]


@triton.constexpr_function
def _parities(words, second, out):
    """Return PTX for 1 - p of two words' points.

    The results are the last bits of both 16-bit halves.
    """
    mask, factor = ("0x11111111, 0x88888888", "0x44444444, 0x22222222")[second].split(", ")
    lines = []
    for word, register in zip(words, ("%mq", "%ms"), strict=True):  # the product's highest bit is the parity
        lines += [f"and.b32 {register}, {word}, {mask};", f"mul.lo.u32 {register}, {register}, {factor};"]
    lines += ["shr.u32 %mq, %mq, 31;", "shr.u32 %ms, %ms, 15;", "and.b32 %ms, %ms, 0x10000;"]
    return [*lines, f"lop3.b32 {out}, %mq, %ms, 0x10001, 0x56;"]  # (a | b) ^ c


@triton.constexpr_function
def _block(lines):
    return "{\n.reg .b32 %mq, %ms, %mu<4>, %mv<4>, %mp<4>, %mr<4>;\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def word_layout(warps, steps):
    """Return the layout of words.

    Dimensions: [warps, word, step of 16 columns, lane's column, column].
    """
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], *([0, 0, bit, 0, 0] for bit in _powers(steps))]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    of_warps = [[bit, 0, 0, 0, 0] for bit in _powers(warps)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, 8, steps, 4, 4])


@triton.constexpr_function
def scale_layout(warps):
    """Return the layout of scales [warps, half, word, tile].

    A lane loads those of four tiles together.
    """
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0]]
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[bit, 0, 0, 0] for bit in _powers(warps)], [], [warps, 2, 8, 4]
    )


@triton.constexpr_function
def x_layout(warps, steps, tokens):
    """Return the layout of x that is operand B's.

    Dimensions: [warps, step, lane's column, column, token].
    """
    registers = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], *([0, bit, 0, 0, 0] for bit in _powers(steps))]
    registers += [[0, 0, 0, 0, bit] for bit in _powers(tokens)[3:]]
    lanes = [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 4]]
    of_warps = [[bit, 0, 0, 0, 0] for bit in _powers(warps)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, steps, 4, 4, tokens])


@triton.constexpr_function
def spread_layout(warps):
    """Return the layout of results [tokens, 64 rows].

    Each thread has four rows of a token.
    """
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


@triton.constexpr_function
def only(layout, dimension, rank=5):
    """Return the layout of one dimension of a tensor."""
    for other in reversed(range(rank)):
        if other != dimension:
            layout = gl.SliceLayout(other, layout)
    return layout


@triton.constexpr_function
def _powers(size):
    return [1 << bit for bit in range(size.bit_length() - 1)]
