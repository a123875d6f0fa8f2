"""Round to nearest, and half-quadratic quantization."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS, quantize_matrix, quantizers
from vllm_dymoe.quantize.quantizers import group_ranges

NORM = 0.7  # the exponent in HQQ's objective


def quantized(weight, bits, quantizer, group_size=32, dtype=torch.bfloat16):
    format = MatrixFormat(*weight.shape, encoding_of(bits), group_size, dtype)
    section = torch.full((format.nbytes,), 0xEE, dtype=torch.uint8)
    quantize_matrix(weight, format, quantizer, section)
    return format.view(section)


def random_weight(rows, columns, seed, outliers=False):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    return weight.pow(3) * 400 if outliers else weight


weights = st.builds(random_weight, st.integers(1, 70), st.integers(1, 130), st.integers(0, 10**6), st.booleans())
bit_widths = st.sampled_from([8, 4, 2])


@settings(max_examples=60, deadline=None)
@given(weights, bit_widths, st.sampled_from([32, 64]), st.sampled_from([torch.bfloat16, torch.float16]))
def test_rounding_is_off_by_half_a_step_at_most(weight, bits, group_size, dtype):
    packed = quantized(weight, bits, QUANTIZERS["rtn"], group_size, dtype)
    step = packed.scales_zeros[:, : weight.shape[0], 0].float().t().repeat_interleave(group_size, 1)
    zero = packed.scales_zeros[:, : weight.shape[0], 1].float().t().repeat_interleave(group_size, 1)
    step, zero = step[:, : weight.shape[1]], zero[:, : weight.shape[1]]
    # The zero point is rounded to the dtype, too, which can shift the ends of a group by that much.
    slack = zero.abs() * (2**-8 if dtype is torch.bfloat16 else 2**-11) + 1e-6
    assert bool(((weight - dequantize(packed)).abs() <= step / 2 * (1 + 1e-3) + slack).all())


@settings(max_examples=60, deadline=None)
@given(weights, bit_widths, st.sampled_from([torch.bfloat16, torch.float16]))
def test_rounding_the_scale_never_cuts_off_an_end(weight, bits, dtype):
    """All codes together cover the range of the weights.

    The scale is the smallest number of its dtype with which they do.
    """
    format = MatrixFormat(weight.shape[0], weight.shape[1], encoding_of(bits), 32, dtype)
    groups = F.pad(weight[:, None], (0, -weight.shape[1] % 32), mode="replicate").reshape(-1, 32)
    scales, zeros = (found.float() for found in group_ranges(groups, format))
    needed = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    assert bool((scales >= needed).all())
    below = (scales.to(dtype).view(torch.int16) - 1).view(dtype)
    assert bool(((below.float() < needed) | (needed == 0)).all())
    # The zero point is rounded to nearest: half a unit in its last place, or less than the smallest float16.
    slack = zeros.abs() * (2**-8 if dtype is torch.bfloat16 else 2**-11) * 1.01 + 1e-7
    assert bool((zeros - format.encoding.midpoint * scales <= groups.amin(1) + slack).all())
    assert bool((zeros + (format.encoding.midpoint - 1) * scales >= groups.amax(1) - slack).all())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_that_are_quantized_together_change_nothing(name, monkeypatch):
    weight = random_weight(40, 100, 3, outliers=True)
    together = quantized(weight, 4, QUANTIZERS[name])
    monkeypatch.setattr(quantizers, "_CHUNK", 1)
    alone = quantized(weight, 4, QUANTIZERS[name])
    assert torch.equal(together.weight, alone.weight)
    assert torch.equal(together.scales_zeros, alone.scales_zeros)


@settings(max_examples=40, deadline=None)
@given(weights, bit_widths)
def test_hqq_is_no_worse_than_rounding_in_its_own_norm(weight, bits):
    norms = {}
    for name in QUANTIZERS:
        errors = (weight - dequantize(quantized(weight, bits, QUANTIZERS[name]))).abs().pow(NORM)
        norms[name] = F.pad(errors, (0, -weight.shape[1] % 32)).reshape(-1, 32).sum(1)
    # Sums are in another order here, and an exact weight leaves an error of 1e-9, which counts as 1e-9 ** 0.7.
    assert bool((norms["hqq"] <= norms["rtn"] * (1 + 1e-4) + 1e-5).all())


def test_hqq_is_better_at_two_bits():
    weight = random_weight(256, 256, 1)
    error = {
        name: (weight - dequantize(quantized(weight, 2, QUANTIZERS[name], 64))).abs().pow(NORM).mean().item()
        for name in QUANTIZERS
    }
    assert error["hqq"] < 0.97 * error["rtn"]


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_constant_groups_are_exact(name, bits):
    weight = torch.full((3, 64), 0.25)
    weight[1] = 0
    assert torch.equal(dequantize(quantized(weight, bits, QUANTIZERS[name])), weight)


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize(
    ("bad", "dtype", "sentence"),
    [
        (float("nan"), torch.bfloat16, "NaN or infinite"),
        (float("inf"), torch.bfloat16, "NaN or infinite"),
        (1e30, torch.float16, r"1e\+30, is too large"),
    ],
)
def test_weights_that_cannot_be_represented_are_refused(bits, bad, dtype, sentence):
    weight = random_weight(4, 32, 0)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match=sentence):
        quantized(weight, bits, QUANTIZERS["rtn"], dtype=dtype)
