"""Encodings: how stored bits become numbers (docs/format.md).

16 bits are plain weights. 8, 4 and 2 bits are a uniform grid, weight = (step * code - center) * scale + zero; if
versions are nested, the upper halves of the codes alone are the low version. MXFP4, NVFP4 and FP8 are published floats,
weight = level[code] * scale. Lattice codes are points of E8 (``kernels/lattice.py``).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """How bits become numbers."""

    name: str  # name in options and files
    bits: int  # of a code
    tag: int  # one bit that identifies the encoding in kernels' tables: the number of bits, or a bit that no width uses
    stored_bits: int  # bits of each code in a section; half of them for the residual slice of a nested version
    upper_of: int = 0
    """Bits of the codes whose upper halves these are, 0 for whole codes. Scale and zero are those of the whole code,
    which is assumed to be in the middle of those with this half.
    """
    group_size: int | None = None  # columns of a row that share a scale, or are padded; None if the matrix decides
    scale_dtype: torch.dtype | None = None
    """Dtype of a published float's scale; None for grids, whose scales and zeros have the matrix's dtype."""
    has_factor: bool = False  # whether a matrix has a factor in addition to its scales
    dtype: torch.dtype = torch.uint8  # of a published float of 8 bits
    lattice: bool = False  # whether codes are lattice points, with a scale for each row, of rotated inputs

    @property
    def nested(self) -> bool:
        return self.stored_bits < self.bits

    @cached_property
    def base(self) -> "Encoding":
        return E8_BASE if self.lattice else UPPER_HALVES[self.bits]

    @property
    def floats(self) -> bool:
        return self.scale_dtype is not None

    @property
    def midpoint(self) -> int:
        """The code that stands for the group's zero.

        weight = (code - midpoint) * scale + zero, see ``MatrixFormat.integer_zeros``.
        """
        return 1 << (self.bits - 1)

    @cached_property
    def step(self) -> int:
        """Number of whole codes from one code to the next.

        1 for whole codes; 4 or 16 for upper halves.
        """
        return 1 << (self.upper_of - self.bits) if self.upper_of else 1

    @cached_property
    def center(self) -> float:
        """The midpoint of the grid; 6.5 or 120.5 for upper halves."""
        return (1 << (self.upper_of or self.bits) - 1) - (self.step - 1) / 2

    @cached_property
    def largest(self) -> int:
        """The code of the largest finite 8-bit float; codes above it are infinite or NaN."""
        return int(torch.tensor(torch.finfo(self.dtype).max, dtype=self.dtype).view(torch.uint8))

    def levels(self, codes: Tensor) -> Tensor:
        """Return the numbers of a published float's codes (uint8): float32, same shape."""
        if self.bits == 8:
            return codes.view(self.dtype).float()
        as_e4m3 = (codes & 8) << 4 | (codes & 7) << 2  # of a 64th
        return as_e4m3.view(torch.float8_e4m3fn).float() * 64


PLAIN = Encoding("16", 16, 16, 16)
STEPS = {bits: Encoding(str(bits), bits, bits, bits) for bits in (8, 4, 2)}
UPPER_HALVES = {
    bits: Encoding(f"{bits // 2} of {bits}", bits // 2, bits // 2, bits // 2, upper_of=bits) for bits in (8, 4)
}
"""Encodings by the bits of the whole code."""
NESTED = {bits: Encoding(f"{bits}/{bits // 2}", bits, bits, bits // 2) for bits in (8, 4)}
MXFP4 = Encoding("mxfp4", 4, 32, 4, group_size=32, scale_dtype=torch.float8_e8m0fnu)
NVFP4 = Encoding("nvfp4", 4, 64, 4, group_size=16, scale_dtype=torch.float8_e4m3fn, has_factor=True)
FP8 = Encoding("fp8", 8, 128, 8, scale_dtype=torch.float32, dtype=torch.float8_e4m3fn)
E8 = Encoding("e8", 2, 256, 2, group_size=64, lattice=True)
E8_NESTED = Encoding("e8+e8", 4, 512, 2, group_size=64, lattice=True)
E8_BASE = Encoding("e8 of e8+e8", 2, 256, 2, upper_of=4, group_size=64, lattice=True)

CODEBOOKS = {encoding.name: encoding for encoding in (MXFP4, NVFP4, FP8)}
LATTICES = {encoding.name: encoding for encoding in (E8, E8_NESTED)}
WHOLE = {encoding.tag: encoding for encoding in (PLAIN, *STEPS.values(), *CODEBOOKS.values(), *LATTICES.values())}
"""Encodings of separate versions, and both readings of a lattice's codes, by tag."""


def encoding_of(bits: int, codebook: Encoding | None = None) -> Encoding:
    """Return the encoding of a separate version.

    Raises ValueError if no encoding has this number of bits.
    """
    encoding = codebook or WHOLE.get(bits)
    if encoding is None or encoding.bits != bits:
        known = f"{codebook.bits} for {codebook.name}" if codebook else "one of 16, 8, 4, 2"
        raise ValueError(f"bits is {bits}, expected {known}")
    return encoding
