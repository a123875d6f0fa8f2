"""A matrix that somebody else has quantized, and our section that holds the same integers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_dymoe.kernels import pack, pack_nested
from vllm_dymoe.quantize.floats import FloatMatrix
from vllm_dymoe.residency.matrix import MatrixFormat


@dataclass(frozen=True, eq=False)
class PrequantizedMatrix:
    """Codes, scales and zero points as a checkpoint has them: weight = (code - zero point) * scale.

    Attributes:
        bits: per code; 8, 4 or 2.
        codes: uint8 [rows, columns].
        scales: float [rows, groups], in the checkpoint's dtype.
        zero_points: uint8 [rows, groups]; the middle code everywhere if the quantization is symmetric.
        column_groups: int64 [columns], the group of each column. Groups are neighbours unless columns were quantized in
            the order of their activations (GPTQ's desc_act, compressed-tensors' actorder "group").
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    column_groups: Tensor

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return self.codes.shape

    def narrow(self, dimension: int, start: int, length: int) -> "PrequantizedMatrix":
        """Some rows (dimension 0) or columns (1), as torch.narrow; what tensor parallelism gives a rank."""
        codes = self.codes.narrow(dimension, start, length)
        if dimension == 0:
            scales, zero_points = self.scales.narrow(0, start, length), self.zero_points.narrow(0, start, length)
            return replace(self, codes=codes, scales=scales, zero_points=zero_points)
        return replace(self, codes=codes, column_groups=self.column_groups.narrow(0, start, length))

    def rows(self, which: slice) -> "PrequantizedMatrix":
        """Some rows, with strides."""
        return replace(self, codes=self.codes[which], scales=self.scales[which], zero_points=self.zero_points[which])

    def dequantize(self) -> Tensor:
        """The weights, [rows, columns] in the scales' dtype: one product each, rounded once, as the formats say."""
        groups = self.column_groups
        steps = self.codes.to(torch.int16) - self.zero_points.to(torch.int16)[:, groups]
        return steps.to(self.scales.dtype) * self.scales[:, groups]

    def pack(self, format: MatrixFormat, section: Tensor, base: Tensor | None = None) -> None:
        """Write the same integers and scales into a section, or into two.

        Args:
            format: of the same bits. Its groups may be shorter than the checkpoint's: they share a scale then. With
                integer zeros it holds every zero point exactly, without only the middle code. With an act order it has
                the columns sorted by their groups, those of a group in their own order.
            section: uint8 [format.nbytes], overwritten.
            base: uint8 [format.base.nbytes], overwritten, if the format is nested.

        Raises:
            ValueError: the format cannot hold the numbers as they are.
        """
        check_held(self.scales, format.dtype)
        order = self.column_groups.argsort(stable=True) if format.act_order else None
        stored = self.column_groups if order is None else self.column_groups[order]
        first = stored[:: format.group_size]  # of each of our groups
        if not torch.equal(first.repeat_interleave(format.group_size)[: format.columns], stored):
            where = "even sorted by their groups" if format.act_order else "as they are"
            raise ValueError(
                f"its columns, {where}, do not lie in groups of {format.group_size} neighbours; set hi to 16 and lo to "
                "0, which hold its dequantized weights, or, with several ranks, add --enable-expert-parallel."
            )
        zeros = format.midpoint - self.zero_points[:, first].to(torch.int16)
        if not format.integer_zeros and bool(zeros.any()):
            raise ValueError("it has zero points, although its configuration says that it is symmetric.")
        if base is None:
            pack(format, self.codes, self.scales[:, first], zeros, section, order)
        else:
            pack_nested(format, self.codes, self.scales[:, first], zeros, base, section, order)


Held = PrequantizedMatrix | FloatMatrix
"""A matrix whose numbers are taken as they are."""

Matrix = tuple[Tensor | Held, Tensor | None]
"""A projection's weight [rows, columns], and its bias [rows] if it has one."""


def check_held(scales: Tensor, dtype: torch.dtype) -> None:
    """Refuse scales that a model's dtype would round.

    Raises:
        ValueError: it would, or they are not finite.
    """
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("some of its scales are NaN or infinite; download the checkpoint again.")
    if not torch.equal(scales.to(dtype).to(scales.dtype), scales):
        name = str(scales.dtype).removeprefix("torch.")
        raise ValueError(
            f"its scales are {name} and would be rounded to {str(dtype).removeprefix('torch.')}; use dtype {name}."
            if scales.dtype in (torch.float16, torch.bfloat16)
            else f"its scales are {name} and would be rounded to {str(dtype).removeprefix('torch.')}; "
            "use a checkpoint with 16-bit scales."
        )
