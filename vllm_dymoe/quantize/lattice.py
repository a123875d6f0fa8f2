"""Rounds a whole matrix to lattice points with error feedback.

The points have one reading or two. Inputs are rotated, and eight rows of a column are rounded together to a point of E8
(``kernels/lattice.py``). Later columns compensate for what rounding a column does to the outputs, as in ``gptq`` (LDLQ
of Tseng et al., "QuIP#", 2024). With two readings the base slice is the point nearest to a mean of both targets,
weighted with `LOW_SHARE`, and the residual slice is nearest to what remains of the high target. Sweeps of coordinate
descent choose every point again if that is an improvement; the last sweep gives the low reading less weight, which
improves the high one (`SWEEPS`).

Points are scaled smaller than least squares suggests, because this lowers the model's KL divergence (`SPREAD`). Each
reading has its own scale per row, weighted by the inputs: the low one is unbiased, <W, W'> = <W, W>, and the high one
keeps the row's norm, <W', W'> = <W, W>.
"""

import torch
from torch import Tensor

from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import native, pack, pack_nested
from vllm_dymoe.kernels.lattice import RESIDUAL, WIDTH, in_point_order, in_row_order, nearest, numbers, points
from vllm_dymoe.quantize.gptq import Curvature

LOW_SHARE = 0.55  # weight of the low target in the mean to which the base is nearest
SWEEPS = 1.0, 1.0, 0.4  # as shares of LOW_SHARE, in each sweep of coordinate descent

SPREAD = 1.165  # a row's scale, relative to the root of its mean square

# Columns whose errors are applied to the rest of the matrix in one product.
_BLOCK = 128


def quantize_lattice(
    weight: Tensor,
    format: MatrixFormat,
    curvature: Curvature,
    section: Tensor,
    base: Tensor | None = None,
    low_share: float = LOW_SHARE,
) -> None:
    """Quantize a matrix of rotated inputs, and pack it into its sections.

    ``weight`` is [rows, columns], ``curvature`` that of its inputs. Section and, for nested formats, base are
    overwritten. Raises ValueError for weights that are not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("some of its weights are NaN or infinite; download the checkpoint again.")
    scale = (weight.float().square().mean(1, keepdim=True).sqrt() * SPREAD).to(format.dtype)
    units = weight.float() / torch.where(scale > 0, scale, 1).float()
    padded = torch.nn.functional.pad(units, (0, 0, 0, format.padded_rows - format.rows))
    rounded = _Rounding(in_point_order(padded).t()[curvature.order].contiguous(), 1 + format.nested)
    rounded.go(curvature.factor, low_share)
    damped = curvature.damped()
    for part in SWEEPS if format.nested else SWEEPS[:1]:
        rounded.descend(damped, part * low_share)
    sorted_codes = rounded.codes[0] if base is None else rounded.codes[0] << 2 | rounded.codes[1]
    codes = torch.empty_like(sorted_codes)
    codes[curvature.order] = sorted_codes
    codes = in_row_order(codes.t())
    low = numbers(codes >> 2 if format.nested else codes, nested=False)[: format.rows]
    seen = units @ curvature.hessian
    square = (seen * units).sum(1, keepdim=True)
    low_scale = _scaled(scale, square / (seen * low).sum(1, keepdim=True))
    if base is None:
        pack(format, codes, low_scale, low_scale, section)
    else:
        high = numbers(codes, nested=True)[: format.rows]
        size = ((high @ curvature.hessian) * high).sum(1, keepdim=True)
        pack_nested(format, codes, low_scale, _scaled(scale, (square / size).sqrt()), base, section)


def _scaled(scale: Tensor, gain: Tensor) -> Tensor:
    """Multiply scales by gains, except gains that are far from 1 or not finite."""
    return (scale.float() * torch.where((gain > 0.5) & (gain < 2), gain, 1)).to(scale.dtype)


class _Rounding:
    """A matrix in units of its rows' scales, and its points so far.

    The matrix is [columns, rows], in the order of rounding. Points are codes, uint8 [columns, rows], of the base slice
    and, with two streams, of the residual slice.
    """

    def __init__(self, weight: Tensor, streams: int) -> None:
        self._weight = weight.unsqueeze(1).expand(-1, streams, -1).contiguous()  # [columns, streams, rows], high first
        self.codes = [torch.zeros(weight.shape, dtype=torch.uint8) for _ in range(streams)]

    def read(self) -> Tensor:
        """Return the values of both readings: float32 [columns, streams, rows]."""
        base = points(self.codes[0])
        return torch.stack([base + RESIDUAL * points(codes) for codes in self.codes[1:]] + [base], 1)

    def go(self, factor: Tensor, low_share: float) -> None:
        """Round every column, passing errors on to later ones by U, see ``Curvature``."""
        left = self._weight.clone()
        for start in range(0, len(left), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(left)))
            some = factor[block, block]
            errors = self._round(low_share, block, left[block], some, some.diagonal())
            left[block.stop :].flatten(1).addmm_(factor[block, block.stop :].t(), errors.flatten(1), alpha=-1)

    def descend(self, hessian: Tensor, low_share: float) -> None:
        """Choose every column's points again, given all others."""
        before = self.read()
        slope = hessian @ (before - self._weight).flatten(1)
        diagonal = hessian.diagonal()
        for start in range(0, len(before), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(before)))
            left = before[block] - slope[block].view_as(before[block]) / diagonal[block, None, None]
            some = hessian[block, block] / diagonal[block]
            errors = self._round(low_share, block, left, some, torch.ones_like(diagonal[block]), before[block])
            slope.addmm_(hessian[:, block], errors.flatten(1))

    def _round(
        self,
        low_share: float,
        block: slice,
        left: Tensor,
        factors: Tensor,
        divisors: Tensor,
        before: Tensor | None = None,
    ) -> Tensor:
        """Round a block of columns in their order; return the errors to pass on.

        Errors are float32, shaped like ``left``, which is overwritten.

        Args:
            left: float32 [columns, streams, rows], the target of each column.
            factors: [columns, columns]; an earlier column's factor times its error is subtracted from a later one's
                target.
            divisors: [columns], divides the error, which is target minus value.
            before: the values so far; the error is then the change from them, and a change has to be an improvement.
        """
        library, codes = native.load(), [part[block] for part in self.codes]
        errors = torch.empty_like(left)
        if library is not None:
            parts = left, errors, codes[0], codes[-1], factors.contiguous(), divisors.contiguous()
            library.round_block(low_share, before, *parts)
            return errors
        for column, wanted in enumerate(left):
            base, *residual = choose(wanted, low_share)
            made = torch.stack([points(base) + RESIDUAL * points(codes) for codes in residual] + [points(base)])
            if before is None:
                errors[column] = (wanted - made) / divisors[column]
                taken = torch.ones_like(base, dtype=torch.bool)
            else:
                weights = torch.tensor([1.0, low_share / (1 - low_share)][: len(wanted)])[:, None]
                costs = [((wanted - some).square() * weights).sum(0) for some in (before[column], made)]
                taken = torch.less(*(cost.view(-1, WIDTH).sum(1) for cost in reversed(costs)))
                taken = taken.repeat_interleave(WIDTH)
                errors[column] = torch.where(taken, made - before[column], 0)
            for part, new in zip(codes, (base, *residual), strict=True):
                part[column] = torch.where(taken, new, part[column])
            left[column + 1 :].sub_(factors[column, column + 1 :, None, None] * errors[column])
        return errors


def choose(wanted: Tensor, low_share: float) -> list[Tensor]:
    """Return codes of the base slice and, with two streams, the residual slice.

    ``wanted`` is float32 [streams, rows], the codes are uint8 [rows].
    """
    base = nearest(torch.lerp(wanted[0], wanted[-1], low_share))
    return [base, nearest((wanted[0] - points(base)) / RESIDUAL)][: len(wanted)]
