"""The kernels' gated activations against their plain twins, for all inputs."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.matrices import ACTIVATIONS
from tests.kernels.sections import DEVICE
from vllm_dymoe.kernels.triton.activation import constants, gated


@triton.jit
def gated_kernel(gates, ups, out, activation: tl.constexpr, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, gated(tl.load(gates + at), tl.load(ups + at), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_far_beyond_the_clamps(activation):
    """Random weights give values too small to reach GPT-OSS's clamps at 7."""
    values = torch.linspace(-24, 24, 64)
    gates, ups = (part.flatten().contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    out = torch.full_like(gates, float("nan"), device=DEVICE)
    gated_kernel[(1,)](gates.to(DEVICE), ups.to(DEVICE), out, constants(activation), gates.numel())
    gates, ups = gates.double(), ups.double()
    want = activation.gated(gates, ups) if activation.has_gate else activation.alone(ups)
    # All is float32, and products reach 600. A constant with one digit fewer fails.
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-5)
