"""Half-quadratic quantization: move each group's zero to where a robust norm of the error is smallest.

Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models"
(2023): minimise the l_p norm, p < 1, of w - dequantize(quantize(w)) over the
zero. An auxiliary error e splits the problem into two that have closed forms,

    e    = shrink(w - w_q),   shrink(x) = sign(x) * max(0, |x| - |x|**(p - 1) / beta)
    zero = mean(w - e - (code - midpoint) * scale)

and beta grows with each round. A few large errors then cost less than many small
ones, which suits weights with outliers. No data are needed.
"""

import torch
from torch import Tensor

from vllm_dymoe.kernels import MatrixFormat
from vllm_dymoe.quantize.base import Codes, group_ranges, grouped, nearest_codes

_NORM = 0.7
_BETA = 10.0
_BETA_GROWTH = 1.01
_ROUNDS = 20


class HalfQuadratic:
    """HQQ from the start of round-to-nearest; each group keeps the best zero that was seen.

    Errors are measured in units of the group's scale, so that the result does not
    depend on how large the weights are, and with the zero rounded as it is stored.
    """

    name = "hqq"

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:
        """See :class:`vllm_dymoe.quantize.base.Quantizer`."""
        groups = grouped(weight, format)
        scales, zeros = group_ranges(groups, format)
        best_codes = nearest_codes(groups, scales, zeros, format)
        # Groups of equal weights are exact already; any step but 0 keeps them so.
        steps = torch.where(scales == 0, 1, scales).float().unsqueeze(2)
        scaled = groups / steps
        valid = torch.arange(format.padded_columns, device=weight.device).view(1, format.groups, -1) < format.columns
        count = valid.sum(2)
        codes = best_codes
        errors = self._errors(scaled, codes, zeros, steps, format)
        best_zeros, best_norms = zeros, self._norms(errors, valid)
        beta = _BETA
        for _ in range(_ROUNDS):
            size = errors.abs()
            shrunk = errors.sign() * (size - size.pow(_NORM - 1) / beta).clamp_(min=0)
            target = scaled - shrunk - (codes - format.midpoint)
            means = (target * valid).sum(2) / count
            zeros = torch.where(scales == 0, zeros, (means * steps.squeeze(2)).to(format.dtype))
            codes = nearest_codes(groups, scales, zeros, format)
            errors = self._errors(scaled, codes, zeros, steps, format)
            norms = self._norms(errors, valid)
            better = norms < best_norms
            if not bool(better.any()):
                break
            best_norms = torch.where(better, norms, best_norms)
            best_zeros = torch.where(better, zeros, best_zeros)
            beta *= _BETA_GROWTH
        best_codes = nearest_codes(groups, scales, best_zeros, format).to(torch.uint8)
        return Codes(best_codes.view(format.rows, -1)[:, : format.columns], scales, best_zeros)

    @staticmethod
    def _errors(scaled: Tensor, codes: Tensor, zeros: Tensor, steps: Tensor, format: MatrixFormat) -> Tensor:
        """Weight minus its quantized value, in steps."""
        return scaled - zeros.float().unsqueeze(2) / steps - (codes - format.midpoint)

    @staticmethod
    def _norms(errors: Tensor, valid: Tensor) -> Tensor:
        """The l_p norm of each group, to the power of p."""
        return (errors.abs().pow(_NORM) * valid).sum(2)
