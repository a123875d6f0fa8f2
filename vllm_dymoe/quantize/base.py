"""From real weights to one packed matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels import pack, pack_nested
from vllm_dymoe.residency.matrix import MatrixFormat

# Weights that are quantized together on a CPU: half a megabyte of floats.
_CHUNK = 1 << 17


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized matrix before packing: weight = (code - 2**(bits - 1)) * scale + zero, or as upper halves are read.

    Attributes:
        codes: uint8 [rows, columns].
        scales: the format's dtype [rows, groups], not negative.
        zeros: the format's dtype [rows, groups].
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


class Quantizer(Protocol):
    """A way to choose codes, scales and zeros.

    Attributes:
        name: as it stands in the configuration.
    """

    name: str

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:
        """Choose codes for a matrix.

        Args:
            format: of the packed matrix, below 16 bits.

        Raises:
            ValueError: weights that are not finite, too large for the format's dtype, or of another shape.
        """
        ...


def quantize_matrix(
    weight: Tensor, format: MatrixFormat, quantizer: Quantizer, section: Tensor, base: Tensor | None = None
) -> Codes | None:
    """Quantize a matrix and pack it; at 16 bits just round it to the format's dtype.

    Args:
        quantizer: not used at 16 bits.
        base: uint8 [format.base.nbytes], overwritten, if the format is nested.

    Returns:
        What was packed; None at 16 bits.

    Raises:
        ValueError: weights that cannot be represented, or shapes that do not fit.
    """
    if format.quantized:
        codes = quantizer.quantize(weight, format)
        if base is None:
            pack(format, codes.codes, codes.scales, codes.zeros, section)
        else:
            pack_nested(format, codes.codes, codes.scales, codes.zeros, base, section)
        return codes
    _check_shape(weight, format)
    packed = format.view(section)
    section[format.weight_bytes :].zero_()
    packed.weight.copy_(weight)
    if not bool(torch.isfinite(packed.weight).all()):
        raise _not_representable(weight, format)
    return None


def dequantized(codes: Codes, format: MatrixFormat) -> Tensor:
    """The weights that codes stand for: a new float32 [rows, columns]."""
    missing = format.padded_columns - format.columns
    groups = F.pad(codes.codes, (0, missing)).view(format.rows, format.groups, format.group_size)
    weights = (groups.float() * format.code.step - format.code.center).mul_(codes.scales.float().unsqueeze(2))
    return weights.add_(codes.zeros.float().unsqueeze(2)).view(format.rows, -1)[:, : format.columns]


def pack_bias(bias: Tensor, format: MatrixFormat, section: Tensor) -> Tensor:
    """Write a bias behind the weights of its section.

    Args:
        format: of the section, one that has a bias.
        section: uint8 [format.nbytes], overwritten from format.bias_offset to format.order_offset.

    Returns:
        What was written: uint8, that part of the section.

    Raises:
        ValueError: another shape, or values that cannot be represented.
    """
    if tuple(bias.shape) != (format.rows,):
        raise ValueError(f"the bias has shape {list(bias.shape)}, expected [{format.rows}].")
    written = section[format.bias_offset : format.order_offset].zero_()
    packed = format.view(section)
    assert packed.bias is not None, "the format has no bias"
    packed.bias.copy_(bias)
    if not bool(torch.isfinite(packed.bias).all()):
        raise _not_representable(bias, format)
    return written


def quantize_groups(
    weight: Tensor, format: MatrixFormat, quantize: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
) -> Codes:
    """Cut a matrix into groups and quantize them some rows at a time, so that they stay in a cache.

    Args:
        format: below 16 bits.
        quantize: (groups, partial) -> codes [n, group_size], scales [n], zeros [n]. groups is float32
            [n, group_size]; a row's last group is filled up with its last weight, which changes neither its smallest
            nor its largest. partial is None, or float32 like groups, 1 for each weight and 0 for what fills up.

    Raises:
        ValueError: the weight has another shape than the format, or what `quantize` raises.
    """
    _check_shape(weight, format)
    missing = format.padded_columns - format.columns
    codes = weight.new_empty(format.rows, format.padded_columns, dtype=torch.uint8)
    scales, zeros = weight.new_empty(2, format.rows, format.groups, dtype=format.dtype).unbind(0)
    step = max(1, (_CHUNK if weight.device.type == "cpu" else 64 * _CHUNK) // format.padded_columns)
    for start in range(0, format.rows, step):
        rows = slice(start, min(start + step, format.rows))
        part = weight[rows].float()
        partial = None
        if missing:
            partial = F.pad(torch.ones_like(part), (0, missing)).view(-1, format.group_size)
            part = torch.cat((part, part[:, -1:].expand(-1, missing)), 1)
        found = quantize(part.reshape(-1, format.group_size), partial)
        for whole, piece in zip((codes, scales, zeros), found, strict=True):
            whole[rows].view(-1).copy_(piece.reshape(-1))
    return Codes(codes[:, : format.columns], scales, zeros)


def group_ranges(groups: Tensor, format: MatrixFormat) -> tuple[Tensor, Tensor]:
    """Scale and zero of each group that cover it from its smallest to its largest weight.

    The scale is rounded up to the format's dtype, so that rounding never cuts off
    an end; what that adds is shared by both ends. A group of equal weights gets
    scale 0 and the weight as its zero.

    Returns:
        scales and zeros, the format's dtype [n].

    Raises:
        ValueError: weights that are not finite, or too large for the format's dtype.
    """
    low, high = groups.aminmax(dim=1)
    exact = (high - low) / (2**format.bits - 1)
    scales = exact.to(format.dtype)
    # The successor of a float that is not negative is the successor of its bits.
    above = (scales.view(torch.int16) + 1).view(format.dtype)
    scales = torch.where(scales.float() < exact, above, scales)
    # Codes run from -2**(bits-1) to 2**(bits-1) - 1, so their middle is half a step below the zero.
    zeros = ((low + high) / 2 + scales.float() / 2).to(format.dtype)
    if not bool((torch.isfinite(scales) & torch.isfinite(zeros)).all()):
        raise _not_representable(groups, format)
    return scales, zeros


def nearest_codes(groups: Tensor, scales: Tensor, zeros: Tensor, format: MatrixFormat) -> Tensor:
    """The code nearest to each weight under scales and zeros as they are stored: float32, like groups.

    Args:
        scales: [n]; where it is 0 every code means the zero, and the middle one is taken.
    """
    steps = torch.where(scales == 0, torch.inf, scales).float().unsqueeze(1)
    offsets = (groups - zeros.float().unsqueeze(1)).div_(steps).round_()
    return offsets.add_(format.midpoint).clamp_(0, 2**format.bits - 1)


def _check_shape(weight: Tensor, format: MatrixFormat) -> None:
    if tuple(weight.shape) != (format.rows, format.columns):
        raise ValueError(f"the weight has shape {list(weight.shape)}, expected [{format.rows}, {format.columns}].")


def _not_representable(weight: Tensor, format: MatrixFormat) -> ValueError:
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        return ValueError(f"{int((~finite).sum())} of its weights are NaN or infinite; download the checkpoint again.")
    return ValueError(f"its largest weight, {weight.abs().max():.3g}, is too large for {format.dtype}; use bfloat16.")
