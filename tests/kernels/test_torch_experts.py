"""Matrices larger than a block of dequantization, outputs larger than a chunk."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.matrices import random_packed
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import combine, dequantize, torch_experts
from vllm_dymoe.kernels.torch_experts import linear

# The result is rounded once, to 8 or 11 bits of mantissa; sums are float32.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}

# Seven blocks of rows, two at a time; the last block is incomplete.
ROWS, COLUMNS = 405, 2500


def relative_error(got, x, packed):
    bias = None if packed.bias is None else packed.bias.double()
    want = F.linear(x.double(), dequantize(packed, torch.float64), bias)
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize(("bias", "act_order"), [(False, False), (True, False), (True, True)])
def test_rows_that_are_computed_one_after_the_other_meet(bias, act_order, bits, dtype, tokens, monkeypatch):
    monkeypatch.setattr(torch_experts, "_WEIGHTS_AT_ONCE", 2 * 64 * 2560)
    packed = random_packed(
        MatrixFormat(ROWS, COLUMNS, encoding_of(bits), 64, dtype, bias, act_order=act_order and bits < 16)
    )
    x = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert relative_error(linear(x, packed), x, packed) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 70), (65, 33), (130, 5)])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_smallest_matrices_are_rounded_once(rows, columns, bits):
    packed = random_packed(MatrixFormat(rows, columns, encoding_of(bits), 32, torch.bfloat16))
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = F.linear(x.double(), dequantize(packed, torch.float64))
    # The tolerance is half a unit in the last place of bfloat16, and float32 sums of at most 70 terms of size 1.
    torch.testing.assert_close(linear(x, packed).double(), want, rtol=2**-8, atol=1e-5)


def test_combine_in_chunks_adds_the_same():
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(200 * 4, 1024, generator=generator).bfloat16()
    weights = torch.rand(200, 4, generator=generator)
    ids = torch.randint(-1, 9, (200, 4), generator=generator)
    out[(ids < 0).flatten() | (ids == 7).flatten()] = float("nan")
    whole = combine(out, weights, ids, {7}, renormalize=True)
    for token in (0, 63, 64, 199):
        rows = slice(4 * token, 4 * token + 4)
        alone = combine(out[rows], weights[token : token + 1], ids[token : token + 1], {7}, renormalize=True)
        assert torch.equal(whole[token], alone[0])
