"""The plain torch path on a GPU; the same operations are tested on the CPU elsewhere."""

import pytest
import torch

from benchmarks.gpu.experts import ExpertWork, compute_experts
from tests.kernels.matrices import random_expert
from vllm_dymoe.kernels import Activation, combine, dequantize, expert_reference, make_kernel, pack, unpack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(packed):
    """The same matrix, packed again on the GPU from its codes."""
    format = packed.format
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8, device="cuda")
    if format.quantized:
        scales, zeros = packed.scales_zeros[:, : format.rows].permute(2, 1, 0).cuda()
        pack(format, unpack(packed).cuda(), scales, zeros, section)
    else:
        format.view(section).weight.copy_(packed.weight)
    moved = format.view(section)
    if packed.bias is not None:
        moved.bias.copy_(packed.bias)
    assert torch.equal(dequantize(moved).cpu(), dequantize(packed))
    return moved


# Two roundings of the inner activation, one of the result: 8 bits of mantissa in bf16, 11 in fp16.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_the_plain_kernel_agrees_with_the_reference(bits, tokens, dtype, tolerance, bias):
    expert = random_expert(1100, 200, bits, 64, dtype, bias=bias)
    x = torch.randn(tokens, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.arange(tokens, device="cuda")
    work = ExpertWork(on_gpu(expert.gate), on_gpu(expert.up), on_gpu(expert.down), rows, rows)
    out = torch.full((tokens, 1100), float("nan"), dtype=dtype, device="cuda")
    compute_experts(make_kernel("cuda"), x.cuda(), [work], out, Activation.SILU)
    got = combine(out, torch.ones(tokens, 1, device="cuda")).cpu().double()
    want = expert_reference(x, expert.gate, expert.up, expert.down, Activation.SILU)
    assert (got - want).norm() / want.norm() < tolerance
