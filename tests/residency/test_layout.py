"""One blob: three matrices with what the expert has."""

import torch

from vllm_dymoe.residency.code import MXFP4, code_of
from vllm_dymoe.residency.format import Format, stored_formats


def test_published_floats_have_no_halves():
    made = {bits: Format(64, 96, code_of(bits, MXFP4 if bits == 4 else None), 32, torch.bfloat16) for bits in (4, 2)}
    assert stored_formats((4, 2), made.__getitem__) == made


def test_slices_of_experts_without_a_gate():
    fine = stored_formats((4, 2), lambda bits: Format(64, 96, code_of(bits), 32, torch.bfloat16, has_gate=False))[4]
    slices = [torch.zeros(size, dtype=torch.uint8) for size in (fine.base.nbytes, fine.nbytes)]
    gate, up, _ = fine.view(slices[1], fine.base.view(slices[0]))
    assert (gate.weight.numel(), gate.fine.numel()) == (0, 0)
    assert up.fine.data_ptr() == slices[1].data_ptr()
