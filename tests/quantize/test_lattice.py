"""Lattice codes of a matrix: choices of both implementations, and row scales."""

import pytest
import torch

from vllm_dymoe.experts.encoding import LATTICES
from vllm_dymoe.experts.format import ExpertFormat, Projection
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.pack import rotated_weights
from vllm_dymoe.quantize import lattice
from vllm_dymoe.quantize.gptq import Curvature

RANDOM = torch.Generator().manual_seed(3)
WIDE = ExpertFormat(160, 96, LATTICES["e8+e8"], 64, torch.bfloat16).matrices[Projection.UP]
INPUTS = torch.randn(512, 160, generator=RANDOM) @ torch.randn(160, 160, generator=RANDOM)
WEIGHT = torch.randn(96, 160, generator=RANDOM) / 10
CURVATURE = Curvature.of(INPUTS.t() @ INPUTS)


def readings():
    """Return the low and the high version, dequantized for rotated inputs.

    Both are [rows, columns].
    """
    base, residual = (torch.zeros(form.nbytes, dtype=torch.uint8) for form in (WIDE.base, WIDE))
    lattice.quantize_lattice(WEIGHT, WIDE, CURVATURE, residual, base)
    low = WIDE.base.view(base)
    return rotated_weights(low), rotated_weights(WIDE.view(residual, low))


def products(left, right):
    return ((left @ CURVATURE.hessian) * right).sum(1)


def test_rows_of_the_low_reading_are_unbiased_and_those_of_the_high_one_as_large_as_they_were():
    low, high = readings()
    # The tolerance is that of the scales: bfloat16 has eight significant bits.
    torch.testing.assert_close(products(WEIGHT, low), products(WEIGHT, WEIGHT), rtol=2**-8, atol=0)
    torch.testing.assert_close(products(high, high), products(WEIGHT, WEIGHT), rtol=2**-7, atol=0)


def test_more_sweeps_are_for_the_better_and_the_last_one_for_the_high_reading(monkeypatch):
    errors = {}
    for name, sweeps in {"ours": lattice.SWEEPS, "one": (1.0,), "alike": (1.0,) * len(lattice.SWEEPS)}.items():
        monkeypatch.setattr(lattice, "SWEEPS", sweeps)
        errors[name] = [CURVATURE.output_norm(read - WEIGHT) for read in readings()]
    assert all(ours < one for ours, one in zip(errors["ours"], errors["one"], strict=True))
    assert errors["ours"][1] < errors["alike"][1]


@pytest.mark.skipif(native.load() is None, reason="no compiler built the library here")
def test_both_implementations_choose_the_same_points(monkeypatch):
    fast = readings()
    monkeypatch.setattr(native, "load", lambda: None)
    for ours, theirs in zip(readings(), fast, strict=True):
        # Sums in another order may decide a near tie differently, and then all later choices differ.
        assert (ours == theirs).float().mean() > 0.9
        assert CURVATURE.output_norm(ours - WEIGHT) == pytest.approx(CURVATURE.output_norm(theirs - WEIGHT), rel=0.01)
