"""Half-quadratic quantization: move each group's zero to where a robust norm of the error is smallest.

Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models"
(2023): minimise the l_p norm, p < 1, of w - dequantize(quantize(w)) over the
zero. An auxiliary error e splits the problem into two that have closed forms,

    e    = shrink(w - w_q),   shrink(x) = sign(x) * max(0, |x| - |x|**(p - 1) / beta)
    zero = mean(w - e - (code - midpoint) * scale)

and beta grows with each round. A few large errors then cost less than many small
ones, which suits weights with outliers. No data are needed.
"""

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


def _quantize(groups: Tensor, valid: Tensor | None, format: MatrixFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of groups [n, group_size]; valid has 1 for each weight and 0 for what fills a group."""
    scales, zeros = group_ranges(groups, format)
    codes, zeros = nearest_codes(groups, scales, zeros, format), zeros.clone()
    valid = torch.ones(1, 1, device=groups.device).expand_as(groups) if valid is None else valid
    lowest = torch.full_like(zeros, torch.inf, dtype=torch.float32)
    active = torch.nonzero(scales).flatten()  # a group of equal weights is exact already
    moved, beta = zeros[active], _BETA
    for number in range(_ROUNDS + 1):
        weights, weighs, steps = groups[active], valid[active], scales[active].float()
        found = nearest_codes(weights, scales[active], moved, format)
        errors = weights - moved.float().unsqueeze(1)
        errors.div_(steps.unsqueeze(1)).sub_(found).add_(format.midpoint).mul_(weighs)
        powers = errors.abs().pow_(_NORM)
        norms = powers.sum(1)
        better = torch.nonzero(norms < lowest[active]).flatten()
        improved = active[better]
        codes[improved], zeros[improved], lowest[improved] = found[better], moved[better], norms[better]
        if number == _ROUNDS:
            break
        # What shrinking takes off an error x, in steps: x * min(1, |x|**p / (beta * x**2)).
        taken = (powers / (errors.square() + _TINY)).div_(beta).clamp_(max=1).mul_(errors)
        means = taken.sum(1) / weighs.sum(1)
        again = (moved.float() + means * steps).to(zeros.dtype)
        moving = torch.nonzero(again != moved).flatten()
        if len(moving) == 0:
            break
        active, moved = active[moving], again[moving]
        beta *= _BETA_GROWTH
    return codes, scales, zeros
