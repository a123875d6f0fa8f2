"""GPTQ: what rounding one column does to the output is made up for by the columns that are not rounded yet.

Frantar, Ashkboos, Hoefler & Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2023), algorithm 1. X [tokens, columns] are the inputs that a matrix saw and H = X^T X their Hessian; the
codes are to make |X (W - dequantize(codes))^T|^2 small. Let U be the upper Cholesky factor of H^-1. Column i is
rounded; its error, divided by U[i, i] and multiplied by U[i, j], is taken off every later column j.

Columns go by falling H[i, i], so that many are left to make up for those that matter most. Scales and zeros are chosen
before, for groups of neighbouring columns as they lie in memory, so the order costs nothing when the matrix is read
("static groups", llm-compressor's default too). They cover each group's whole range: narrower ones with a smaller error
make all weights smaller, and lose more (benchmarks/LOG.md).

Written here, because the libraries that have it, GPTQModel and llm-compressor, quantize the modules of a model that
they load, onto grids whose zeros are whole numbers. Ours are 16-bit weights (docs/format.md), which fit a group better.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.kernels import MatrixFormat
from vllm_dymoe.quantize.base import Codes
from vllm_dymoe.quantize.rtn import RoundToNearest

DAMPING = 0.01
"""Added to the Hessian's diagonal, as a share of its mean: keeps what few tokens say from being believed entirely."""

# Columns whose errors reach the rest of the matrix in one product.
_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Curvature:
    """What GPTQ needs of a Hessian; the same for every matrix that reads the same inputs, and for every bit-width.

    Attributes:
        hessian: float32 [columns, columns], not damped.
        order: int64 [columns], the order in which columns are rounded.
        factor: float32 [columns, columns], U in that order: the inverse of the damped Hessian is U^T U.
    """

    hessian: Tensor
    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, hessian: Tensor) -> "Curvature":
        """Factorize X^T X, float [columns, columns]; where it is zero, columns are rounded each by itself.

        Raises:
            ValueError: it is not finite.
        """
        if not bool(torch.isfinite(hessian).all()):
            raise ValueError("inputs are NaN, infinite or too large.")
        order = hessian.diagonal().argsort(descending=True, stable=True)
        damped = hessian.double()[order][:, order]
        damped.diagonal().add_(DAMPING * float(hessian.diagonal().mean()) or 1.0)
        # Read backwards, the lower factor of a matrix is an upper one, H = R R^T, and U is the inverse of R.
        upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
        identity = torch.eye(len(order), dtype=upper.dtype, device=upper.device)
        factor = torch.linalg.solve_triangular(upper, identity, upper=True)
        return cls(hessian.float(), order, factor.float())

    def output_norm(self, weight: Tensor) -> float:
        """|X weight^T|^2 for a weight [rows, columns], in units of the Hessian's."""
        weight = weight.float()
        return float(((weight @ self.hessian) * weight).sum(dtype=torch.float64))


class Gptq:
    """GPTQ for the matrices that read one kind of input.

    Args:
        curvature: of their inputs.
    """

    name = "gptq"

    def __init__(self, curvature: Curvature) -> None:
        self.curvature = curvature

    def quantize(self, weight: Tensor, format: MatrixFormat) -> Codes:
        """See :class:`vllm_dymoe.quantize.base.Quantizer`."""
        grids = RoundToNearest().quantize(weight, format)
        return Codes(_round_columns(weight.float(), grids, self.curvature, format), grids.scales, grids.zeros)


def _round_columns(weight: Tensor, grids: Codes, curvature: Curvature, format: MatrixFormat) -> Tensor:
    """Codes [rows, columns] of a float32 weight on grids that are given: algorithm 1, one row here for each column."""
    order, factor = curvature.order, curvature.factor
    left = weight.t()[order]  # [columns, rows], as rounding goes on
    group_of = (order // format.group_size).tolist()
    scales, zeros = grids.scales.float().t().contiguous(), grids.zeros.float().t().contiguous()
    steps = torch.where(scales == 0, torch.inf, scales)
    codes = torch.empty_like(left)
    for start in range(0, len(order), _BLOCK):
        stop = min(start + _BLOCK, len(order))
        errors = left.new_empty(stop - start, left.shape[1])
        for column in range(start, stop):
            group = group_of[column]
            code = (left[column] - zeros[group]).div_(steps[group]).round_()
            code.clamp_(-format.midpoint, format.midpoint - 1)
            error = errors[column - start]
            torch.addcmul(zeros[group], code, scales[group], out=error)
            torch.sub(left[column], error, out=error).div_(factor[column, column])
            left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
            codes[column] = code
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    found = torch.empty_like(codes, dtype=torch.uint8)
    found[order] = codes.add_(format.midpoint).to(torch.uint8)
    return found.t()
