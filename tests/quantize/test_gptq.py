"""GPTQ against a plain one, column by column with an inverse for each, and against rounding."""

import pytest
import torch

from tests.quantize.recordings import correlated_inputs
from vllm_dymoe.kernels import MatrixFormat, dequantize
from vllm_dymoe.quantize import gptq, make_quantizer, quantize_matrix
from vllm_dymoe.quantize.gptq import DAMPING, Curvature, Gptq


def random_weight(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def packed(weight, quantizer, bits, group_size=32, dtype=torch.bfloat16):
    format = MatrixFormat(*weight.shape, bits, group_size, dtype)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    quantize_matrix(weight, format, quantizer, section)
    return format.view(section)


def output_error(inputs, weight, matrix):
    return (inputs.double() @ (weight.double() - dequantize(matrix, torch.float64)).t()).norm().item()


def plain_gptq(weight, hessian, scales, zeros, group_size, bits):
    """Codes by the definition (OBQ's update for one column): the best change of the columns that are left.

    For column i, with H the Hessian of the columns that are left, they change by
    -(w_i - q_i) / [H^-1]_ii * [H^-1]_i; every inverse is computed anew, in float64.
    """
    left = weight.double().clone()
    hessian = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    remaining = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    while remaining:
        column = remaining[0]
        inverse = torch.linalg.inv(hessian[remaining][:, remaining])
        scale, zero = scales[:, column // group_size].double(), zeros[:, column // group_size].double()
        steps = torch.where(scale == 0, torch.inf, scale)
        code = ((left[:, column] - zero) / steps).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        codes[:, column] = (code + 2 ** (bits - 1)).to(torch.uint8)
        error = left[:, column] - (code * scale + zero)
        left[:, remaining] -= torch.outer(error / inverse[0, 0], inverse[0])
        remaining.pop(0)
    return codes


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 96, 128), (3, 70, 16), (1, 33, 7)])
def test_codes_are_those_of_the_plain_algorithm(bits, rows, columns, block, monkeypatch):
    monkeypatch.setattr(gptq, "_BLOCK", block)
    inputs, weight = correlated_inputs(200, columns, 1), random_weight(rows, columns, 2)
    format = MatrixFormat(rows, columns, bits, 32, torch.bfloat16)
    hessian = inputs.t() @ inputs
    found = Gptq(Curvature.of(hessian)).quantize(weight, format)
    assert torch.equal(found.codes, plain_gptq(weight, hessian, found.scales, found.zeros, 32, bits))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("columns", [256, 200])
def test_the_output_is_much_nearer_than_that_of_rounding(bits, columns):
    """On inputs that were not seen, of the same kind."""
    inputs = correlated_inputs(3000, columns, 3)
    seen, unseen = inputs[:2000], inputs[2000:]
    weight = random_weight(64, columns, 4)
    matrix = packed(weight, Gptq(Curvature.of(seen.t() @ seen)), bits, 64)
    rounded, half_quadratic = (packed(weight, make_quantizer(name), bits, 64) for name in ("rtn", "hqq"))
    assert output_error(unseen, weight, matrix) < 0.5 * output_error(unseen, weight, rounded)
    assert output_error(unseen, weight, matrix) < 0.5 * output_error(unseen, weight, half_quadratic)


@pytest.mark.parametrize("bits", [4, 2])
def test_the_hessian_must_be_that_of_the_inputs(bits):
    mine, other = correlated_inputs(2000, 128, 5), correlated_inputs(2000, 128, 6)
    weight = random_weight(64, 128, 7)
    right = packed(weight, Gptq(Curvature.of(mine.t() @ mine)), bits)
    wrong = packed(weight, Gptq(Curvature.of(other.t() @ other)), bits)
    assert output_error(mine, weight, right) < 0.6 * output_error(mine, weight, wrong)


def test_output_norm_is_that_of_the_output():
    inputs, weight = correlated_inputs(300, 64, 8), random_weight(20, 64, 9)
    expected = (inputs.double() @ weight.double().t()).square().sum().item()
    assert Curvature.of(inputs.t() @ inputs).output_norm(weight) == pytest.approx(expected, rel=1e-4)


def test_few_tokens_and_columns_that_are_always_zero():
    """A Hessian of low rank is what an expert with few tokens has; damping makes it one that can be inverted."""
    inputs = correlated_inputs(6, 64, 10)
    inputs[:, 5] = 0
    weight = random_weight(8, 64, 11)
    matrix = packed(weight, Gptq(Curvature.of(inputs.t() @ inputs)), 4)
    assert bool(torch.isfinite(dequantize(matrix)).all())
    # Nothing makes up for a column without inputs, and nothing it makes up for changes it by more than its own step.
    assert (dequantize(matrix) - weight)[:, 5].abs().max() < 0.05
    assert output_error(inputs, weight, matrix) < 0.5 * output_error(
        inputs, weight, packed(weight, make_quantizer("rtn"), 4)
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_constant_groups_are_exact(bits):
    inputs = correlated_inputs(100, 64, 12)
    weight = torch.full((3, 64), 0.25)
    weight[1] = 0
    assert torch.equal(dequantize(packed(weight, Gptq(Curvature.of(inputs.t() @ inputs)), bits)), weight)


def test_without_inputs_columns_are_rounded_to_nearest():
    weight = random_weight(6, 70, 13)
    matrix = packed(weight, Gptq(Curvature.of(torch.zeros(70, 70))), 4)
    half = matrix.scales_zeros[:, :6, 0].float().t().repeat_interleave(32, 1)[:, :70] / 2
    assert bool(((weight - dequantize(matrix)).abs() <= half * 1.01 + 1e-4).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hessians_that_are_not_finite_are_refused(value):
    hessian = torch.eye(4)
    hessian[1, 2] = value
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        Curvature.of(hessian)
