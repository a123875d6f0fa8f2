"""The launch that counts a router's choices gives the counts of its plain twin."""

import pytest
import torch

from tests.kernels.sections import DEVICE
from vllm_dymoe.cache.device_table import count_uses
from vllm_dymoe.kernels.triton.uses import CountUses

LAYERS, EXPERTS = 3, 12
POISON = float("nan"), float("inf"), -float("inf"), 1e30


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (17, 2), (40, 3), (300, 8)])
def test_counts_are_the_twins(tokens, top_k):
    generator = torch.Generator().manual_seed(tokens)
    precision = torch.randint(0, 3, (LAYERS, EXPERTS), generator=generator).to(torch.int8)
    uses = torch.zeros(3 * (LAYERS * EXPERTS + 1), dtype=torch.int64)
    found, count = uses.to(DEVICE, copy=True), CountUses()
    for layer in range(LAYERS):
        ids = torch.randint(-1, EXPERTS, (tokens, top_k), generator=generator, dtype=torch.int32)
        weights = torch.randn(tokens, top_k, generator=generator).softmax(1)
        weights[layer % tokens, layer % top_k] = POISON[layer]
        count_uses(uses, precision, layer * EXPERTS, ids, weights)
        count(found, precision.to(DEVICE), layer, ids.to(DEVICE), weights.to(DEVICE))
    assert torch.equal(found.cpu(), uses)
    bins = LAYERS * EXPERTS + 1
    assert uses[bins - 1] + uses[2 * bins - 1] > 0 or tokens == 1, "choices of experts of other ranks"
    assert all(part.any() for part in uses.view(3, bins)) or tokens == 1
