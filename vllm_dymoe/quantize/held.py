"""Matrices that another tool quantized, and their exact packing into our sections."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.experts.encoding import STEPS, Encoding
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import pack, pack_floats, pack_nested

# No model has a weight of 2^64, and products with it would exceed the range of floats.
_LARGEST_SCALE = 2.0**64


@dataclass(frozen=True, eq=False)
class Held:
    """Codes and scales of a checkpoint, kept bit for bit.

    An integer means (code - zero point) * scale, a published float level[code] * (scale * multiplier / divisor).
    """

    encoding: Encoding
    codes: Tensor  # uint8 [rows, columns]
    scales: Tensor  # [groups of rows, groups of columns], in the checkpoint's dtype, or that of the published float
    row_groups: Tensor  # int64 [rows], each row's row of scales
    column_groups: Tensor
    """int64 [columns], each column's column of scales. Groups are contiguous unless columns were quantized in the
    order of their activations (GPTQ's desc_act, compressed-tensors' actorder "group").
    """
    factor: tuple[float, float] = (1.0, 1.0)  # multiplier and divisor of all scales, float32 numbers
    zero_points: Tensor | None = None
    """Zero points of integers, uint8 with the scales' shape; everywhere the middle code if they are symmetric."""

    @property
    def bits(self) -> int:
        return self.encoding.bits

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def part(self, dimension: int, which: slice) -> "Held":
        """Return a part of the rows (dimension 0) or columns (1)."""
        if dimension == 1:
            return replace(self, codes=self.codes[:, which], column_groups=self.column_groups[which])
        return replace(self, codes=self.codes[which], row_groups=self.row_groups[which])

    def filled(self, rows: int, columns: int) -> "Held":
        """Return published floats of this shape, padded with zeros.

        The padding comes after the last row and column.
        """
        below, right = rows - self.shape[0], columns - self.shape[1]
        return replace(
            self,
            codes=F.pad(self.codes, (0, right, 0, below)),
            row_groups=torch.cat((self.row_groups, self.row_groups[-1:].expand(below))),
            column_groups=torch.cat((self.column_groups, self.column_groups[-1:].expand(right))),
        )

    def dequantize(self) -> Tensor:
        """Return the weights [rows, columns].

        Each is rounded once to the scales' dtype; they are float32 for published floats.
        """
        if self.zero_points is None:
            multiplier, divisor = torch.tensor(self.factor, dtype=torch.float32)
            scales = self.scales.float() * multiplier / divisor  # in the order of the tools that wrote them
            return self.encoding.levels(self.codes) * scales[self.row_groups][:, self.column_groups]
        zeros = self.zero_points.to(torch.int16)[self.row_groups][:, self.column_groups]
        steps = self.codes.to(torch.int16) - zeros
        return steps.to(self.scales.dtype) * self.scales[self.row_groups][:, self.column_groups]

    def pack(self, format: MatrixFormat, section: Tensor, base: Tensor | None = None) -> None:
        """Write the same codes and scales into a section.

        If the format is nested there are two sections. The format's groups may be shorter than the checkpoint's: then
        several share a scale. With an act order, columns are sorted by their groups. Raises ValueError if the format
        cannot hold the numbers exactly.
        """
        if self.zero_points is None:
            first = _first_of_groups(self.column_groups, format, "columns are not in groups of {} with one scale")
            # As bytes, because not every dtype of scales can be indexed.
            raw = self.scales.contiguous().view(torch.uint8).view(*self.scales.shape, -1)
            chosen = raw.index_select(0, self.row_groups).index_select(1, first)
            pack_floats(format, self.codes, chosen.view(self.scales.dtype).squeeze(2), section, self.factor)
            return
        self.check_scales(format.dtype)
        order = self.column_groups.argsort(stable=True) if format.act_order else None
        stored = self.column_groups if order is None else self.column_groups[order]
        where = "even sorted by their groups" if format.act_order else "as they are"
        first = _first_of_groups(stored, format, f"columns, {where}, are not in contiguous groups of {{}}")
        zeros = format.encoding.midpoint - self.zero_points[self.row_groups][:, first].to(torch.int16)
        if not format.integer_zeros and bool(zeros.any()):
            raise ValueError("it has zero points, although its configuration says that it is symmetric.")
        scales = self.scales[self.row_groups][:, first]
        if base is None:
            pack(format, self.codes, scales, zeros, section, order)
        else:
            pack_nested(format, self.codes, scales, zeros, base, section, order)

    def check_scales(self, dtype: torch.dtype) -> None:
        """Raise ValueError for scales that cannot be kept.

        Scales must be finite, and the model's dtype must not round them. Published floats are never rounded.
        """
        if self.zero_points is None:
            return
        if not bool(torch.isfinite(self.scales).all()):
            raise ValueError("some of its scales are NaN or infinite; download the checkpoint again.")
        if not torch.equal(self.scales.to(dtype).to(self.scales.dtype), self.scales):
            name, short = (str(kind).removeprefix("torch.") for kind in (self.scales.dtype, dtype))
            halves = self.scales.dtype in (torch.float16, torch.bfloat16)
            advice = f"use dtype {name}" if halves else "use a checkpoint with 16-bit scales"
            raise ValueError(f"its scales are {name} and would be rounded to {short}; {advice}.")


Matrix = tuple[Tensor | Held, Tensor | None]  # a projection's weight [rows, columns], and its bias [rows] if it has one


def integers(bits: int, codes: Tensor, scales: Tensor, zero_points: Tensor, column_groups: Tensor) -> Held:
    """Return integers with scales and zero points [rows, groups]."""
    return Held(STEPS[bits], codes, scales, torch.arange(len(codes)), column_groups, zero_points=zero_points)


def nearest(weight: Tensor, format: MatrixFormat) -> Held:
    """Return the nearest codes of a published format to a weight [rows, columns].

    Integers get symmetric codes. The largest weight of a group gets the largest code. Used for drafts, whose experts
    share the slots of their model's.
    """
    encoding, (rows, columns) = format.encoding, weight.shape
    size = encoding.group_size or format.group_size
    groups = F.pad(weight.float(), (0, -columns % size)).view(rows, -1, size)
    largest = groups.abs().amax(2)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("some of its weights are NaN or infinite; download the checkpoint again.")
    if not encoding.floats:
        middle = 1 << encoding.bits - 1
        scales = (largest / (middle - 1)).clamp(min=torch.finfo(format.dtype).tiny).to(format.dtype)
        codes = (groups / scales.float().unsqueeze(2)).round().add(middle).clamp(0, 2 * middle - 1).to(torch.uint8)
        zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
        return integers(encoding.bits, codes.view(rows, -1)[:, :columns], scales, zeros, blocks(columns, size))
    assert encoding.scale_dtype is not None
    levels = encoding.levels(torch.arange(1 << encoding.bits, dtype=torch.uint8))
    levels, order = torch.where(levels.isfinite(), levels, torch.inf).sort(stable=True)
    top = float(levels[levels.isfinite()].max())
    factor = 1.0
    wanted = largest / top
    if encoding.has_factor:
        factor = max(float(wanted.max()) / torch.finfo(encoding.scale_dtype).max, torch.finfo(torch.float32).tiny)
    scales = (wanted / factor).to(encoding.scale_dtype)
    if encoding.scale_dtype is torch.float8_e8m0fnu:  # powers of two, rounded up so that nothing is clipped
        scales = torch.exp2(wanted.clamp(min=2.0**-126).log2().ceil()).to(encoding.scale_dtype)
    steps = scales.float() * factor
    scaled = groups / torch.where(steps == 0, 1.0, steps).unsqueeze(2)
    chosen = torch.bucketize(scaled.clamp(-top, top), (levels[:-1] + levels[1:]) / 2)
    codes = order.to(torch.uint8)[chosen].view(rows, -1)[:, :columns]
    return Held(encoding, codes, scales, torch.arange(rows), blocks(columns, size), (factor, 1.0))


def check_floats(held: Held) -> Held:
    """Return ``held`` if its codes and scales are usable.

    Raises ValueError for codes or scales that are not numbers, or a scale too large for a weight.
    """
    again = "download the checkpoint again."
    if held.bits == 8 and int((held.codes & 0x7F).max()) > held.encoding.largest:
        raise ValueError(f"some of its weights are NaN; {again}")
    if held.scales.dtype.itemsize > 1:
        largest = float(held.scales.abs().max())
    else:  # bytes without their sign are ordered like their numbers, with NaN after all
        raw = held.scales.view(torch.uint8) & (0x7F if held.scales.dtype is torch.float8_e4m3fn else 0xFF)
        largest = float(raw.max().view(held.scales.dtype))
    if not (math.isfinite(largest) and bool(torch.tensor(held.factor, dtype=torch.float32).isfinite().all())):
        raise ValueError(f"some of its scales are NaN or infinite; {again}")
    if held.factor[1] == 0 or largest > _LARGEST_SCALE:
        raise ValueError(f"some of its scales are too large for a weight; {again}")
    return held


def blocks(size: int, block: int | None) -> Tensor:
    """Return the block index of each row or column: int64 [size].

    ``block`` None means one block.
    """
    return torch.arange(size) // (block or size)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Unpack 4-bit codes [rows, columns] from bytes [rows, columns / 2].

    The first code is in the low half of its byte.
    """
    # A byte becomes two in one word, whose lower one comes first in memory: twice as fast as writing every second byte.
    words = packed.to(torch.int16)
    both = words << 4
    return both.bitwise_or_(words).bitwise_and_(0x0F0F).view(torch.uint8)


def _first_of_groups(stored: Tensor, format: MatrixFormat, what: str) -> Tensor:
    """Return the checkpoint's group for each of our groups.

    ``stored`` is the checkpoint's group of each stored column. Raises ValueError if one of our groups has columns of
    several.
    """
    first = stored[:: format.group_size]
    if not torch.equal(first.repeat_interleave(format.group_size)[: format.columns], stored):
        raise ValueError(
            f"its {what.format(format.group_size)}; set high to 16 and low to 0, which stores its dequantized weights, "
            f"or, "
            "with several ranks, add --enable-expert-parallel."
        )
    return first


def widened(part: Tensor, projection: Projection, missing: int) -> Tensor:
    """Return a weight or bias padded with zeros to the widest expert.

    Columns of down are padded, and rows of the others.
    """
    if not missing or (projection is Projection.DOWN and part.dim() == 1):
        return part
    return F.pad(part, (0, missing) if projection is Projection.DOWN or part.dim() == 1 else (0, 0, 0, missing))
