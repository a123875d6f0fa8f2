"""The layout of one packed expert: three matrices and their parameters."""

import torch

from vllm_dymoe.experts.encoding import MXFP4, encoding_of
from vllm_dymoe.experts.format import ExpertFormat, stored_formats


def test_published_floats_have_no_halves():
    made = {
        bits: ExpertFormat(64, 96, encoding_of(bits, MXFP4 if bits == 4 else None), 32, torch.bfloat16)
        for bits in (4, 2)
    }
    assert stored_formats((4, 2), made.__getitem__) == made


def test_slices_of_experts_without_a_gate():
    residual = stored_formats(
        (4, 2), lambda bits: ExpertFormat(64, 96, encoding_of(bits), 32, torch.bfloat16, has_gate=False)
    )[4]
    slices = [torch.zeros(size, dtype=torch.uint8) for size in (residual.base.nbytes, residual.nbytes)]
    gate, up, _ = residual.view(slices[1], residual.base.view(slices[0]))
    assert (gate.weight.numel(), gate.residual.numel()) == (0, 0)
    assert up.residual.data_ptr() == slices[1].data_ptr()
