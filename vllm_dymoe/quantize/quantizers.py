"""Quantizers: from real weights to codes and scales, and to a packed matrix."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.experts.matrix import MatrixFormat, PackedMatrix
from vllm_dymoe.kernels import pack, pack_nested
from vllm_dymoe.quantize.held import nearest

# Weights that are quantized together on a CPU: half a megabyte of floats.
_CHUNK = 1 << 17
# Parameters of HQQ: the norm, its relaxation, the growth of that per round, and the number of rounds.
_NORM, _BETA, _BETA_GROWTH, _ROUNDS = 0.7, 10.0, 1.01, 20
# Avoids 0 / 0 when an error of 0 is shrunk.
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized matrix before packing.

    weight = (code - 2**(bits - 1)) * scale + zero, or as its halves are read.
    """

    codes: Tensor  # uint8 [rows, columns]
    scales: Tensor  # the format's dtype [rows, groups], not negative
    zeros: Tensor  # the format's dtype [rows, groups]


Quantizer = Callable[[Tensor, MatrixFormat], Codes]
"""Chooses codes for a weight [rows, columns] below 16 bits; ValueError if the format cannot represent it."""


def round_to_nearest(weight: Tensor, format: MatrixFormat) -> Codes:
    """Round to codes spread evenly between each group's smallest and largest weight."""

    return quantize_groups(
        weight, format, lambda groups, _, scales, zeros: (nearest_codes(groups, scales, zeros, format), zeros)
    )


def half_quadratic(weight: Tensor, format: MatrixFormat) -> Codes:
    """Quantize by HQQ, which needs no data.

    Each group's zero moves to where a robust norm of the error is smallest. Badri & Shaji, "Half-Quadratic Quantization
    of Large Machine Learning Models" (2023), minimise the l_p norm, p < 1, of w - dequantize(quantize(w)) over the
    zero. An auxiliary error e splits the problem into two with closed forms,

        e    = shrink(w - w_q),   shrink(x) = sign(x) * max(0, |x| - |x|**(p - 1) / beta)
        zero = mean(w - e - (code - midpoint) * scale)

    and beta grows with each round. Errors are in units of the group's scale. Each group keeps its best zero.
    """

    def quantize(groups: Tensor, valid: Tensor | None, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        codes, zeros = nearest_codes(groups, scales, zeros, format), zeros.clone()
        valid = torch.ones(1, 1, device=groups.device).expand_as(groups) if valid is None else valid
        lowest = torch.full_like(zeros, torch.inf, dtype=torch.float32)
        active = torch.nonzero(scales).flatten()  # a group of equal weights is exact already
        moved, beta = zeros[active], _BETA
        for number in range(_ROUNDS + 1):
            weights, weighs, steps = groups[active], valid[active], scales[active].float()
            found = nearest_codes(weights, scales[active], moved, format)
            errors = weights - moved.float().unsqueeze(1)
            errors.div_(steps.unsqueeze(1)).sub_(found).add_(format.encoding.midpoint).mul_(weighs)
            powers = errors.abs().pow_(_NORM)
            norms = powers.sum(1)
            better = torch.nonzero(norms < lowest[active]).flatten()
            improved = active[better]
            codes[improved], zeros[improved], lowest[improved] = found[better], moved[better], norms[better]
            if number == _ROUNDS:
                break
            # What shrinking removes from an error x, in steps: x * min(1, |x|**p / (beta * x**2)).
            taken = (powers / (errors.square() + _TINY)).div_(beta).clamp_(max=1).mul_(errors)
            means = taken.sum(1) / weighs.sum(1)
            again = (moved.float() + means * steps).to(zeros.dtype)
            moving = torch.nonzero(again != moved).flatten()
            if len(moving) == 0:
                break
            active, moved = active[moving], again[moving]
            beta *= _BETA_GROWTH
        return codes, zeros

    return quantize_groups(weight, format, quantize)


QUANTIZERS: dict[str, Quantizer] = {"rtn": round_to_nearest, "hqq": half_quadratic}


def quantize_matrix(
    weight: Tensor, format: MatrixFormat, quantizer: Quantizer, section: Tensor, base: Tensor | None = None
) -> None:
    """Quantize a matrix and pack it into its sections.

    At 16 bits it is rounded to the format's dtype, and for a published format to its nearest numbers. ValueError for
    weights that cannot be represented, or shapes that do not fit.
    """
    if not format.quantized:
        _check_shape(weight, format)
        section[format.weight_bytes :].zero_()
        _copy(weight, format.view(section).weight)
        return
    if format.encoding.floats or format.integer_zeros or format.act_order:
        _check_shape(weight, format)
        nearest(weight, format).pack(format, section, base)
        return
    codes = quantizer(weight, format)
    if base is None:
        pack(format, codes.codes, codes.scales, codes.zeros, section)
    else:
        pack_nested(format, codes.codes, codes.scales, codes.zeros, base, section)


def pack_bias(bias: Tensor, packed: PackedMatrix) -> None:
    """Write a bias [rows] into its section.

    Raises ValueError for another shape, or values that cannot be stored.
    """
    if tuple(bias.shape) != (packed.format.rows,):
        raise ValueError(f"the bias has shape {list(bias.shape)}, expected [{packed.format.rows}].")
    assert packed.bias is not None, "the format has no bias"
    _copy(bias, packed.bias)


def quantize_groups(
    weight: Tensor,
    format: MatrixFormat,
    quantize: Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Codes:
    """Divide a matrix into groups and quantize them.

    Some rows are quantized at a time, so that they stay in a cache. ``quantize`` maps (groups, valid, scales, zeros) to
    codes and zeros. groups is float32 [n, group_size]; a row's last group is padded with its last weight. valid is
    None, or shaped like groups, 1 for each weight and 0 for padding. scales and zeros [n] cover each group's range.
    """
    _check_shape(weight, format)
    missing = format.padded_columns - format.columns
    codes = weight.new_empty(format.rows, format.padded_columns, dtype=torch.uint8)
    scales, zeros = weight.new_empty(2, format.rows, format.groups, dtype=format.dtype).unbind(0)
    step = max(1, (_CHUNK if weight.device.type == "cpu" else 64 * _CHUNK) // format.padded_columns)
    for start in range(0, format.rows, step):
        rows = slice(start, min(start + step, format.rows))
        part = weight[rows].float()
        valid = None
        if missing:
            valid = F.pad(torch.ones_like(part), (0, missing)).view(-1, format.group_size)
            part = torch.cat((part, part[:, -1:].expand(-1, missing)), 1)
        groups = part.reshape(-1, format.group_size)
        steps, middles = group_ranges(groups, format)
        chosen, middles = quantize(groups, valid, steps, middles)
        for whole, piece in ((codes, chosen), (scales, steps), (zeros, middles)):
            whole[rows].view(-1).copy_(piece.reshape(-1))
    return Codes(codes[:, : format.columns], scales, zeros)


def group_ranges(groups: Tensor, format: MatrixFormat) -> tuple[Tensor, Tensor]:
    """Return scale and zero of each group, [n] in the format's dtype.

    They cover the group from its smallest to its largest weight. The scale is rounded up, so that rounding never clips
    an end. A group of equal weights gets scale 0 and the weight as its zero. Raises ValueError for weights that are not
    finite, or too large for the dtype.
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
        raise _not_representable(groups, format.dtype)
    return scales, zeros


def nearest_codes(groups: Tensor, scales: Tensor, zeros: Tensor, format: MatrixFormat) -> Tensor:
    """Return the code nearest to each weight: float32, shaped like ``groups``.

    It is the middle code where the scale is 0.
    """
    steps = torch.where(scales == 0, torch.inf, scales).float().unsqueeze(1)
    offsets = (groups - zeros.float().unsqueeze(1)).div_(steps).round_()
    return offsets.add_(format.encoding.midpoint).clamp_(0, 2**format.bits - 1)


def _check_shape(weight: Tensor, format: MatrixFormat) -> None:
    if tuple(weight.shape) != (format.rows, format.columns):
        raise ValueError(f"the weight has shape {list(weight.shape)}, expected [{format.rows}, {format.columns}].")


def _copy(values: Tensor, packed: Tensor) -> None:
    packed.copy_(values)
    if not bool(torch.isfinite(packed).all()):
        raise _not_representable(values, packed.dtype)


def _not_representable(weight: Tensor, dtype: torch.dtype) -> ValueError:
    finite = torch.isfinite(weight)
    if not bool(finite.all()):
        return ValueError(f"{int((~finite).sum())} of its weights are NaN or infinite; download the checkpoint again.")
    return ValueError(f"its largest weight, {weight.abs().max():.3g}, is too large for {dtype}; use bfloat16.")
