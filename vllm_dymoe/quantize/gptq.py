"""GPTQ: later columns compensate for what rounding a column does to the output.

Frantar, Ashkboos, Hoefler & Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2023), algorithm 1. X [tokens, columns] are the inputs that a matrix saw and H = X^T X their Hessian;
codes are chosen to minimise |X (W - dequantize(codes))^T|^2. Let U be the upper Cholesky factor of H^-1. Column i is
rounded; its error, divided by U[i, i] and multiplied by U[i, j], is subtracted from every later column j.

Columns are processed by descending H[i, i], so that many columns remain to compensate for those that matter most.
Scales and zeros are chosen before, for groups of neighbouring columns ("static groups"), so the order costs nothing
when the matrix is read. They cover each group's whole range: narrower ones shrink all weights and lose more
(benchmarks/LOG.md).

In a nested version a code is read in two ways, and each reading has its own error. The code minimises the sum of the
two squared errors, the low one multiplied by a weight. The weight depends on how correlated a matrix's inputs are,
which varies by orders of magnitude, so it is chosen for each matrix. One sweep of coordinate descent follows, which
chooses every column's codes once more (Behdin et al., "QuantEase", 2023).

This is our own implementation because GPTQModel and llm-compressor quantize modules of a loaded model onto grids whose
zeros are integers. Our zeros are 16-bit weights (docs/format.md), which fit a group better.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.quantize.quantizers import Codes, round_to_nearest

DAMPING = 0.01
"""Added to the Hessian's diagonal, as a share of its mean: limits the influence of few tokens."""

LOW_WEIGHT = 2.0
"""Weight of the low reading's output error relative to the high one's, measured as if each were optimised alone."""

# Columns whose errors reach the rest of the matrix in one product.
_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Curvature:
    """What GPTQ needs of a Hessian.

    Every matrix that reads the same inputs has the same curvature.
    """

    hessian: Tensor  # float32 [columns, columns], not damped
    order: Tensor  # int64 [columns], the order in which columns are rounded
    factor: Tensor  # float32 [columns, columns], U in that order: the inverse of the damped Hessian is U^T U
    mass: float = 1.0  # sum of the squares of the tokens' routing weights

    @classmethod
    def of(cls, hessian: Tensor, mass: float = 1.0) -> "Curvature":
        """Factorize X^T X, float [columns, columns]; ValueError if it is not finite."""
        if not bool(torch.isfinite(hessian).all()):
            raise ValueError("inputs are NaN, infinite or too large.")
        order = hessian.diagonal().argsort(descending=True, stable=True)
        damped = _damped(hessian.double(), order)
        # Reversed, the lower factor of a matrix is an upper one, H = R R^T, and U is the inverse of R.
        upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
        identity = torch.eye(len(order), dtype=upper.dtype, device=upper.device)
        factor = torch.linalg.solve_triangular(upper, identity, upper=True)
        return cls(hessian.float(), order, factor.float(), mass)

    def damped(self) -> Tensor:
        return _damped(self.hessian, self.order)

    def output_norm(self, weight: Tensor) -> float:
        """Return |X weight^T|^2 for a weight [rows, columns], in units of the Hessian's."""
        weight = weight.float()
        return float(((weight @ self.hessian) * weight).sum(dtype=torch.float64))


def _damped(hessian: Tensor, order: Tensor) -> Tensor:
    damped = hessian[order][:, order]
    damped.diagonal().add_(DAMPING * float(hessian.diagonal().mean()) or 1.0)
    return damped


def quantize_gptq(weight: Tensor, format: MatrixFormat, curvature: Curvature, low_weight: float = LOW_WEIGHT) -> Codes:
    """Quantize a matrix [rows, columns] for inputs of this curvature.

    ``low_weight`` 0 optimises only the high reading.
    """
    grids = round_to_nearest(weight, format)
    columns = weight.float().t()[curvature.order]
    grid = _Grid.of(grids, curvature.order, format)
    codes = _round_columns(columns, grid, curvature.factor)
    if format.nested and low_weight:
        hessian = curvature.damped()
        errors = [grid.read(codes, bin) - columns for bin in (1, grid.bin)]
        high, low = (float(((hessian @ error) * error).sum(dtype=torch.float64)) for error in errors)
        grid = _Grid.of(grids, curvature.order, format, low_weight * high / (low or 1.0))
        if grid.low_weight:
            codes = _descend(_round_columns(columns, grid, curvature.factor), columns, grid, hessian)
    found = torch.empty_like(codes, dtype=torch.uint8)
    found[curvature.order] = codes.add_(format.encoding.midpoint).to(torch.uint8)
    return Codes(found.t(), grids.scales, grids.zeros)


@dataclass(frozen=True, eq=False)
class _Grid:
    """The numbers of codes, counted from the middle code.

    Columns are in the order of rounding.
    """

    scales: Tensor  # float32 [groups, rows], or [groups, 2 * rows] for two readings, the high one first
    zeros: Tensor  # likewise
    steps: Tensor  # scales, infinite where they are 0
    group_of: list[int]  # group of each column
    midpoint: int
    bin: int  # number of codes with the same upper half
    low_weight: float  # weight of the low reading's errors; 0 with one reading

    @classmethod
    def of(cls, codes: Codes, order: Tensor, format: MatrixFormat, low_weight: float = 0.0) -> "_Grid":
        readings = 2 if low_weight else 1
        scales, zeros = (part.float().t().repeat(1, readings) for part in (codes.scales, codes.zeros))
        steps = torch.where(scales == 0, torch.inf, scales)
        group_of = (order // format.group_size).tolist()
        return cls(scales, zeros, steps, group_of, format.encoding.midpoint, 1 << format.bits // 2, low_weight)

    def read(self, codes: Tensor, bin: int) -> Tensor:
        """Return the weights of codes, both [columns, rows].

        Of each code only its bin of ``bin`` adjacent codes is known.
        """
        rows = codes.shape[1]
        middles = codes.div(bin).floor_().mul_(bin).add_((bin - 1) / 2)
        return torch.addcmul(self.zeros[self.group_of, :rows], middles, self.scales[self.group_of, :rows])

    def nearest(self, column: int, wanted: Tensor, out: Tensor) -> Tensor:
        """Write the codes [rows] whose values are nearest to ``wanted`` into ``out``.

        ``wanted`` has [rows or 2 rows] and is overwritten.
        """
        group = self.group_of[column]
        code, read = self._choose(wanted.sub_(self.zeros[group]).div_(self.steps[group]))
        torch.addcmul(self.zeros[group], read, self.scales[group], out=out)
        return code

    def _choose(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best codes for the wanted values, and the value of each reading.

        Values are in steps from the zero.
        """
        if not self.low_weight:
            code = wanted.round_().clamp_(-self.midpoint, self.midpoint - 1)
            return code, code
        high, low = wanted.chunk(2)
        middle = (self.bin - 1) / 2
        code = high.round().clamp_(-self.midpoint, self.midpoint - 1)
        near = code.div(self.bin).floor_().mul_(self.bin).add_(middle)
        # In another bin the code nearest to `high` is at one end, so the sum of squares is a parabola over bins.
        end = torch.where(low > near, 0.0, self.bin - 1.0)
        best = (high - end).add_(low - middle, alpha=self.low_weight).div_((1 + self.low_weight) * self.bin).round_()
        first = best.mul_(self.bin).clamp_(-self.midpoint, self.midpoint - self.bin)
        other = torch.maximum(torch.minimum(high.round(), first + (self.bin - 1)), first)
        far = first.add_(middle)
        gain = (high - code).square_().sub_((high - other).square_())
        gain.add_((low - near).square_().sub_((low - far).square_()), alpha=self.low_weight)
        code = torch.where(gain > 0, other, code)
        return code, torch.cat((code, torch.where(gain > 0, far, near)))


def _round_columns(weight: Tensor, grid: _Grid, factor: Tensor) -> Tensor:
    """Return codes [columns, rows] for a weight [columns, rows].

    Columns are in the order of rounding: algorithm 1, transposed.
    """
    left = weight.repeat(1, 2 if grid.low_weight else 1)  # wanted values as rounding proceeds, for each reading
    codes = torch.empty_like(weight)
    for start in range(0, len(weight), _BLOCK):
        stop = min(start + _BLOCK, len(weight))
        errors = left.new_empty(stop - start, left.shape[1])
        for column in range(start, stop):
            error = errors[column - start]
            codes[column] = grid.nearest(column, left[column].clone(), out=error)
            torch.sub(left[column], error, out=error).div_(factor[column, column])
            left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return codes


def _descend(codes: Tensor, weight: Tensor, grid: _Grid, hessian: Tensor) -> Tensor:
    """Choose each column's codes once more, given all others, for two readings.

    Layouts are as in `_round_columns`.
    """
    error = torch.cat([grid.read(codes, bin) - weight for bin in (1, grid.bin)], 1)
    weight = weight.repeat(1, 2)
    slope = hessian @ error
    for start in range(0, len(weight), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(weight)))
        before, inside = error[block].clone(), slope[block].clone()
        for column in range(start, block.stop):
            wanted = weight[column] + error[column] - inside[column - start] / hessian[column, column]
            read = torch.empty_like(wanted)
            codes[column] = grid.nearest(column, wanted, out=read)
            read.sub_(weight[column])
            inside.addr_(hessian[block, column], read - error[column])
            error[column] = read
        slope.addmm_(hessian[:, block], error[block] - before)
    return codes
