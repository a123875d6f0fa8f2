"""Half-quadratic quantization: move each group's zero to where a robust norm of the error is smallest.

Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models"
(2023): minimise the l_p norm, p < 1, of w - dequantize(quantize(w)) over the
zero. An auxiliary error e splits the problem into two that have closed forms,

    e    = shrink(w - w_q),   shrink(x) = sign(x) * max(0, |x| - |x|**(p - 1) / beta)
    zero = mean(w - e - (code - midpoint) * scale)

and beta grows with each round. A few large errors then cost less than many small
ones, which suits weights with outliers. No data are needed.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm_dymoe.quantize.base import Codes, group_ranges, nearest_codes, quantize_groups
from vllm_dymoe.residency.matrix import MatrixFormat

_NORM = 0.7
_BETA = 10.0
_BETA_GROWTH = 1.01
_ROUNDS = 20

# Keeps 0 / 0 out of the shrinking of an error that is 0.
_TINY = 1e-30


class HalfQuadratic:
    """HQQ from the start of round-to-nearest; each group keeps the best zero it had, and stops when its zero rests.

    Errors are measured in units of the group's scale, so that the result does not
    depend on how large the weights are, and with the zero rounded as it is stored.
    """

    name = "hqq"

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:
        return quantize_groups(weight, format, partial(_quantize, format=format))


@dataclass(frozen=True, eq=False)
class _Solution:
    """Groups under one choice of zeros.

    Attributes:
        groups: float32 [n, group_size], the weights.
        valid: the same, 1 for a weight and 0 for what fills a group up.
        scales: [n], as stored, not 0.
        zeros: [n], as stored.
        codes: float32 [n, group_size].
        errors: float32 [n, group_size], in steps of the scale, 0 where not valid.
        powers: |errors| ** p.
        norms: float32 [n], their sums.
    """

    groups: Tensor
    valid: Tensor
    scales: Tensor
    zeros: Tensor
    codes: Tensor
    errors: Tensor
    powers: Tensor
    norms: Tensor


def _quantize(groups: Tensor, valid: Tensor | None, format: MatrixFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of groups [n, group_size]."""
    scales, zeros = group_ranges(groups, format)
    codes = nearest_codes(groups, scales, zeros, format)
    zeros = zeros.clone()
    # A group of equal weights is exact already.
    active = torch.nonzero(scales).flatten()
    valid = torch.ones(1, 1, device=groups.device).expand_as(groups) if valid is None else valid
    solution = _solve(groups[active], valid[active], scales[active], zeros[active], format)
    lowest = torch.full_like(zeros, torch.inf, dtype=torch.float32)
    lowest[active] = solution.norms
    beta = _BETA
    for _ in range(_ROUNDS):
        moved = _moved_zeros(solution, beta)
        moving = torch.nonzero(moved != solution.zeros).flatten()
        if len(moving) == 0:
            break
        active, moved = active[moving], moved[moving]
        solution = _solve(solution.groups[moving], solution.valid[moving], solution.scales[moving], moved, format)
        better = torch.nonzero(solution.norms < lowest[active]).flatten()
        improved = active[better]
        codes[improved], zeros[improved] = solution.codes[better], moved[better]
        lowest[improved] = solution.norms[better]
        beta *= _BETA_GROWTH
    return codes, scales, zeros


def _solve(groups: Tensor, valid: Tensor, scales: Tensor, zeros: Tensor, format: MatrixFormat) -> _Solution:
    codes = nearest_codes(groups, scales, zeros, format)
    errors = groups - zeros.float().unsqueeze(1)
    errors.div_(scales.float().unsqueeze(1)).sub_(codes).add_(format.midpoint).mul_(valid)
    powers = errors.abs().pow_(_NORM)
    return _Solution(groups, valid, scales, zeros, codes, errors, powers, powers.sum(1))


def _moved_zeros(solution: _Solution, beta: float) -> Tensor:
    """Zeros that minimise the half of the problem that is quadratic: the mean of what shrinking takes off the errors.

    With x - shrink(x) = x * min(1, |x|**p / (beta * x**2)), in steps, the mean of
    w - e - (code - midpoint) * scale is the old zero plus that.
    """
    errors = solution.errors
    taken = (solution.powers / (errors.square() + _TINY)).div_(beta).clamp_(max=1).mul_(errors)
    means = taken.sum(1) / solution.valid.sum(1)
    return (solution.zeros.float() + means * solution.scales.float()).to(solution.zeros.dtype)
