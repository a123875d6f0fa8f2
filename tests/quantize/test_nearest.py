"""A draft's experts are rounded to the format of the model's, for every format."""

import pytest
import torch

from vllm_dymoe.experts.encoding import FP8, MXFP4, NESTED, NVFP4, STEPS
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS, quantize_matrix
from vllm_dymoe.quantize.held import nearest

ROWS, COLUMNS = 24, 130  # neither whole blocks nor whole groups
# The bound is half of the largest step between neighbours, relative to a group's largest weight. That step is 1/7 for
# 4-bit integers; 2/6 for e2m1, from 4 to 6 (twice that for MXFP4, whose scale is a power of two that may be twice too
# large); and about 1/16 for e4m3, by its mantissa.
BOUNDS = {
    "integers": (STEPS[4], {"integer_zeros": True}, 1 / 14),
    "ordered": (STEPS[4], {"act_order": True}, 1 / 14),
    "8 bits": (STEPS[8], {"integer_zeros": True}, 1 / 254),
    "nested": (NESTED[8], {"integer_zeros": True}, 1 / 254),
    "mxfp4": (MXFP4, {}, 2 / 6),
    "nvfp4": (NVFP4, {}, 1 / 6 + 1 / 16),
    "fp8": (FP8, {}, 1 / 28),
}


@pytest.mark.parametrize(("encoding", "fields", "bound"), BOUNDS.values(), ids=BOUNDS)
def test_no_weight_is_further_away_than_half_a_step(encoding, fields, bound):
    form = MatrixFormat(ROWS, COLUMNS, encoding, encoding.group_size or 32, torch.bfloat16, **fields)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    weight[3] = 0
    section = torch.full((form.nbytes,), 0xEE, dtype=torch.uint8)
    base = torch.full((form.base.nbytes,), 0xEE, dtype=torch.uint8) if form.nested else None
    quantize_matrix(weight, form, QUANTIZERS["rtn"], section, base)
    low = None if base is None else form.base.view(base)
    found = dequantize(form.view(section, low), torch.float32)
    assert torch.equal(found[3], torch.zeros(COLUMNS))
    size = form.group_size
    padded = torch.nn.functional.pad(weight, (0, -COLUMNS % size)).view(ROWS, -1, size)
    largest = padded.abs().amax(2).repeat_interleave(size, 1)[:, :COLUMNS]
    # Scales are rounded, too: bfloat16 by 1/256.
    assert bool(((found - weight).abs() <= largest * (bound + 1 / 128) + 1e-7).all())
    assert torch.equal(found.sign(), weight.sign() * (found != 0))
    # Values on the grid stay unchanged.
    again = nearest(found, form).dequantize().float()
    assert bool(((again - found).abs() <= largest * (bound + 1 / 128) + 1e-7).all())


def test_weights_that_are_not_finite_are_refused():
    form = MatrixFormat(2, 32, NVFP4, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="NaN or infinite"):
        nearest(torch.full((2, 32), torch.inf), form)
