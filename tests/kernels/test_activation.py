"""Activations between an expert's projections, against their formulas."""

import math

import pytest
import torch

from tests.kernels.matrices import ACTIVATIONS
from vllm_dymoe.kernels import Activation, Curve


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def clamp(x, limit):
    return max(-limit, min(x, limit))


FORMULAS = {
    Curve.SWIGLU: lambda g, u, a: min(g, a.limit) * sigmoid(a.alpha * min(g, a.limit)) * (clamp(u, a.limit) + a.beta),
    Curve.SWIGLU_STEP: lambda g, u, a: min(g * sigmoid(g), a.limit) * clamp(u, a.limit),
    Curve.SITU: lambda g, u, a: (
        a.beta * math.tanh(g / a.beta) * sigmoid(g) * (u if a.limit == math.inf else a.limit * math.tanh(u / a.limit))
    ),
    Curve.GELU: lambda g, u, a: g * (1 + math.erf(g / math.sqrt(2))) / 2 * u,
    Curve.GELU_TANH: lambda g, u, a: g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2 * u,
    Curve.RELU2: lambda g, u, a: max(g, 0) ** 2 * u,
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_is_its_formula_far_beyond_all_limits(activation):
    values = torch.linspace(-12, 12, 49, dtype=torch.float64)
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    formula, before = FORMULAS[activation.curve], up.clone()
    if activation.has_gate:
        want = [formula(g, u, activation) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
        got = activation.gated(gate.clone(), up)
    else:
        want, got = [formula(g, 1.0, activation) for g in gate.tolist()], activation.alone(gate.clone())
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert torch.equal(up, before)


def test_every_curve_is_tested():
    assert {activation.curve for activation in ACTIVATIONS} == set(Curve)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_is_read_from_its_name(activation):
    assert Activation.parse(str(activation)) == activation


@pytest.mark.parametrize("text", ["", "swish", "swiglu(limit=1)", "swiglu(limit=1, alpha=x, beta=0, has_gate=True)"])
def test_another_name_is_refused(text):
    with pytest.raises(ValueError, match=r"activation|float"):
        Activation.parse(text)
