"""Published floating-point codes: what a code stands for, and what scales come with it.

A code is a small float and not a step of a grid: weight = level[code] * scale. MXFP4 and NVFP4 have the 16 levels of
e2m1 (OCP Microscaling Formats 1.0, 5.3.3), FP8 the 256 of e4m3 (arXiv:2209.05433). Four-bit codes become e4m3 by
shifting: e2m1's three lower bits, two places higher, are the same float at 1/64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codebook:
    """A published format of codes and scales.

    Attributes:
        name: as users and files write it.
        bits: of a code.
        group_size: neighbouring columns of a row that share a scale; None where the matrix decides.
        scale_dtype: of a scale.
        has_factor: whether a matrix has a factor of its own beside its scales.
        tag: how kernels' tables name it, where other formats stand with their bits: one bit that no width is.
    """

    name: str
    bits: int
    group_size: int | None
    scale_dtype: torch.dtype
    has_factor: bool
    tag: int

    def levels(self, codes: Tensor) -> Tensor:
        """What codes (uint8) stand for: float32, of the same shape."""
        if self.bits == 8:
            return codes.view(torch.float8_e4m3fn).float()
        return as_e4m3(codes).view(torch.float8_e4m3fn).float() * E2M1_OF_E4M3


MXFP4 = Codebook("mxfp4", 4, 32, torch.float8_e8m0fnu, has_factor=False, tag=32)
NVFP4 = Codebook("nvfp4", 4, 16, torch.float8_e4m3fn, has_factor=True, tag=64)
FP8 = Codebook("fp8", 8, None, torch.float32, has_factor=False, tag=128)
CODEBOOKS = {book.name: book for book in (MXFP4, NVFP4, FP8)}

E2M1_OF_E4M3 = 64.0
"""e2m1 is that many times the e4m3 that :func:`as_e4m3` makes of it."""


def as_e4m3(codes: Tensor) -> Tensor:
    """e2m1 codes [...] as e4m3 codes of a 64th: uint8."""
    return (codes & 8) << 4 | (codes & 7) << 2
