"""GPTQ against a plain implementation and against rounding."""

from functools import partial

import pytest
import torch

from tests.quantize.recordings import correlated_inputs
from tests.quantize.test_quantizers import quantized, random_weight
from vllm_dymoe.experts.encoding import NESTED, encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, pack_nested
from vllm_dymoe.quantize import QUANTIZERS, gptq
from vllm_dymoe.quantize.gptq import DAMPING, Curvature, quantize_gptq
from vllm_dymoe.quantize.quantizers import Codes


def readings(codes, format):
    base, residual = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (format.base.nbytes, format.nbytes))
    pack_nested(format, codes.codes, codes.scales, codes.zeros, base, residual)
    low = format.base.view(base)
    return dequantize(format.view(residual, low)), dequantize(low)


def output_norm(inputs, error):
    """Return the squared norm of an output error, with GPTQ's damping."""
    inputs, error = inputs.double(), error.double()
    damping = DAMPING * inputs.square().sum(0).mean()
    return ((inputs @ error.t()).square().sum() + damping * error.square().sum()).item()


def output_error(inputs, weight, matrix):
    return (inputs.double() @ (weight.double() - dequantize(matrix, torch.float64)).t()).norm().item()


def plain_gptq(weight, hessian, scales, zeros, group_size, bits, low_weight=0.0):
    """Return GPTQ's codes by definition, with OBQ's update column by column.

    After column i is quantized, the remaining columns change by -(w_i - q_i) / [H^-1]_ii * [H^-1]_i, where H is their
    Hessian. Every inverse is computed anew in float64, and all codes are tried. If the low version has a weight, each
    code is evaluated in both versions, and one sweep of coordinate descent follows.
    """
    hessian = hessian.double() + DAMPING * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    bin = 2 ** (bits // 2)
    codes = torch.arange(2**bits, dtype=torch.float64)
    readings = torch.stack((codes, codes.div(bin).floor() * bin + (bin - 1) / 2)) - 2 ** (bits - 1)
    groups = torch.arange(weight.shape[1]) // group_size
    # [versions, rows, columns, codes]: the value of every code.
    values = readings[:, None, None] * scales.double()[:, groups, None] + zeros.double()[:, groups, None]
    weights = torch.tensor([1.0, low_weight], dtype=torch.float64)[:, None, None]

    def choose(column, wanted):
        best = ((values[:, :, column] - wanted[:, :, None]).square() * weights).sum(0).argmin(1)
        best[scales[:, groups[column]] == 0] = 2 ** (bits - 1)  # where all codes give the same value
        return best, values[:, torch.arange(len(best)), column, best]

    left = torch.stack((weight.double(), weight.double()))
    found, read = torch.empty(weight.shape, dtype=torch.int64), torch.empty_like(left)
    for place, column in enumerate(order):
        remaining = order[place:]
        inverse = torch.linalg.inv(hessian[remaining][:, remaining])
        found[:, column], read[:, :, column] = choose(column, left[:, :, column])
        error = (left[:, :, column] - read[:, :, column]) / inverse[0, 0]
        left[:, :, remaining] -= error[:, :, None] * inverse[0]
    for column in order if low_weight else ():
        error = read - weight.double()
        best = read[:, :, column] - error @ hessian[column] / hessian[column, column]
        found[:, column], read[:, :, column] = choose(column, best)
    return found.to(torch.uint8)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 96, 128), (3, 70, 16), (1, 33, 7)])
def test_codes_are_those_of_the_plain_algorithm(bits, rows, columns, block, monkeypatch):
    monkeypatch.setattr(gptq, "_BLOCK", block)
    inputs, weight = correlated_inputs(200, columns, 1), random_weight(rows, columns, 2)
    format = MatrixFormat(rows, columns, encoding_of(bits), 32, torch.bfloat16)
    hessian = inputs.t() @ inputs
    found = quantize_gptq(weight, format, Curvature.of(hessian))
    assert torch.equal(found.codes, plain_gptq(weight, hessian, found.scales, found.zeros, 32, bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 96, 128), (3, 70, 16)])
@pytest.mark.parametrize("low_weight", [2.0, 50.0])
def test_codes_of_two_readings_are_those_of_the_plain_algorithm(bits, rows, columns, block, low_weight, monkeypatch):
    monkeypatch.setattr(gptq, "_BLOCK", block)
    inputs, weight = correlated_inputs(200, columns, 1), random_weight(rows, columns, 2)
    format = MatrixFormat(rows, columns, NESTED[bits], 32, torch.bfloat16)
    hessian = inputs.t() @ inputs
    found = quantize_gptq(weight, format, Curvature.of(hessian), low_weight)
    grids = found.scales, found.zeros, 32, bits
    blind = Codes(plain_gptq(weight, hessian, *grids), found.scales, found.zeros)
    high, low = (output_norm(inputs, weight - read) for read in readings(blind, format))
    plain = plain_gptq(weight, hessian, *grids, low_weight * high / low)
    assert torch.equal(found.codes, plain)


@pytest.mark.parametrize("noise", [0.05, 1.0], ids=["columns alike", "columns apart"])
def test_the_low_reading_gains_and_the_high_one_loses_little(noise):
    """The inputs decide how much better the high version is, so they are of two kinds."""
    inputs, weight = correlated_inputs(3000, 256, 3), random_weight(64, 256, 4)
    inputs += noise * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(5))
    seen, unseen = inputs[:2000], inputs[2000:]
    format = MatrixFormat(64, 256, NESTED[4], 64, torch.bfloat16)
    curvature = Curvature.of(seen.t() @ seen)

    def errors(low_weight):
        codes = quantize_gptq(weight, format, curvature, low_weight)
        return [(unseen @ (weight - read).t()).norm().item() for read in readings(codes, format)]

    (high, low), (blind_high, blind_low) = errors(gptq.LOW_WEIGHT), errors(0)
    assert low < 0.97 * blind_low
    assert high < 1.15 * blind_high


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("columns", [256, 200])
def test_the_output_is_much_nearer_than_that_of_rounding(bits, columns):
    """Outputs are compared on unseen inputs of the same kind."""
    inputs = correlated_inputs(3000, columns, 3)
    seen, unseen = inputs[:2000], inputs[2000:]
    weight = random_weight(64, columns, 4)
    matrix = quantized(weight, bits, partial(quantize_gptq, curvature=Curvature.of(seen.t() @ seen)), 64)
    rounded, half_quadratic = (quantized(weight, bits, QUANTIZERS[name], 64) for name in ("rtn", "hqq"))
    assert output_error(unseen, weight, matrix) < 0.5 * output_error(unseen, weight, rounded)
    assert output_error(unseen, weight, matrix) < 0.5 * output_error(unseen, weight, half_quadratic)


def test_few_tokens_and_columns_that_are_always_zero():
    """With few tokens the Hessian has low rank; damping makes it invertible."""
    inputs = correlated_inputs(6, 64, 10)
    inputs[:, 5] = 0
    weight = random_weight(8, 64, 11)
    matrix = quantized(weight, 4, partial(quantize_gptq, curvature=Curvature.of(inputs.t() @ inputs)))
    assert bool(torch.isfinite(dequantize(matrix)).all())
    # A column without inputs does not compensate for others, so it changes by less than its own step.
    assert (dequantize(matrix) - weight)[:, 5].abs().max() < 0.05
    assert output_error(inputs, weight, matrix) < 0.5 * output_error(
        inputs, weight, quantized(weight, 4, QUANTIZERS["rtn"])
    )


def test_without_inputs_columns_are_rounded_to_nearest():
    weight = random_weight(6, 70, 13)
    matrix = quantized(weight, 4, partial(quantize_gptq, curvature=Curvature.of(torch.zeros(70, 70))))
    half = matrix.scales_zeros[:, :6, 0].float().t().repeat_interleave(32, 1)[:, :70] / 2
    assert bool(((weight - dequantize(matrix)).abs() <= half * 1.01 + 1e-4).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hessians_that_are_not_finite_are_refused(value):
    hessian = torch.eye(4)
    hessian[1, 2] = value
    with pytest.raises(ValueError, match="NaN, infinite or too large"):
        Curvature.of(hessian)
