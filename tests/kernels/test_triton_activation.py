"""The kernels' gated activations against their plain twins, over all that a projection can give."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.sections import DEVICE
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton.activation import ACTIVATIONS, gated


@triton.jit
def gated_kernel(gates, ups, out, activation: tl.constexpr, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, gated(tl.load(gates + at), tl.load(ups + at), activation))


@pytest.mark.parametrize("activation", Activation)
def test_far_beyond_the_clamps(activation):
    """GPT-OSS's clamps at 7 never show with values of the size that random weights give."""
    values = torch.linspace(-24, 24, 64)
    gates, ups = (part.flatten().contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    out = torch.full_like(gates, float("nan"), device=DEVICE)
    gated_kernel[(1,)](gates.to(DEVICE), ups.to(DEVICE), out, ACTIVATIONS[activation], gates.numel())
    want = activation.gated(gates.double(), ups.double())
    # float32 throughout, where the products reach 600; a constant with one digit less fails.
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-5, atol=1e-5)
