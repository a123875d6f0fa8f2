"""The gated activations against their formulas."""

import math

import pytest
import torch

from vllm_dymoe.kernels import Activation

FORMULAS = {
    Activation.SILU: lambda x: x / (1 + math.exp(-x)),
    Activation.GELU: lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    Activation.GELU_TANH: lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def clamped(gate, up):
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize("activation", FORMULAS)
def test_the_gate_is_activated_and_multiplied(activation):
    gate = torch.linspace(-6, 6, 101, dtype=torch.float64)
    up = torch.linspace(-1, 2, 101, dtype=torch.float64)
    want = torch.tensor([FORMULAS[activation](x) for x in gate.tolist()], dtype=torch.float64) * up
    torch.testing.assert_close(activation.gated(gate.clone(), up), want, rtol=1e-12, atol=1e-15)


def test_gpt_oss_clamps_the_gate_from_above_and_up_from_both_sides():
    """Every pair of values on a grid beyond all limits; up itself is left as it was."""
    values = torch.linspace(-12, 12, 49, dtype=torch.float64)
    gate, up = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    want = [clamped(g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    before = up.clone()
    got = Activation.SWIGLU_OAI.gated(gate.clone(), up)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert torch.equal(up, before)


def test_every_activation_is_tested():
    assert {*FORMULAS, Activation.SWIGLU_OAI} == set(Activation)
