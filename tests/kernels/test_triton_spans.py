"""Copies that a device lists and makes by itself."""

import torch

from tests.kernels.sections import DEVICE
from vllm_dymoe.kernels.triton.spans import copy_spans


def test_copies_are_of_so_many_bytes_and_of_no_more():
    """Sizes are none, part of one program's turn, and many turns of all programs."""
    lengths = [0, 16, 4096, 16 * 8192 * 2 + 8192 + 48]
    sources = [torch.randint(0, 255, (max(count, 16),), dtype=torch.uint8, device=DEVICE) for count in lengths]
    slots = [torch.full((len(source) + 16,), 0xEE, dtype=torch.uint8, device=DEVICE) for source in sources]
    spans = [
        (source.data_ptr(), slot.data_ptr(), count) for source, slot, count in zip(sources, slots, lengths, strict=True)
    ]
    copy_spans(torch.tensor(spans, device=DEVICE))
    for source, slot, count in zip(sources, slots, lengths, strict=True):
        assert torch.equal(slot[:count], source[:count])
        assert (slot[count:] == 0xEE).all()
