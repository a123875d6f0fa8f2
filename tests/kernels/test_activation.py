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


@pytest.mark.parametrize("activation", Activation)
def test_the_gate_is_activated_and_multiplied(activation):
    gate = torch.linspace(-6, 6, 101, dtype=torch.float64)
    up = torch.linspace(-1, 2, 101, dtype=torch.float64)
    want = torch.tensor([FORMULAS[activation](x) for x in gate.tolist()], dtype=torch.float64) * up
    torch.testing.assert_close(activation.gated(gate.clone(), up), want, rtol=1e-12, atol=1e-15)
