"""The value of a layer, computed from how much it changes its tokens."""

import numpy as np
import pytest
import torch

from tests.cache.test_migration import STORES, dynaexq
from tests.executor.steps import random_step
from vllm_dymoe.cache.layer_changes import LayerChanges
from vllm_dymoe.planner.routing import Phase, Routing


def test_a_layers_change_is_one_less_the_squared_cosine_of_two_routers_inputs():
    changes, generator = LayerChanges(3), torch.Generator().manual_seed(0)
    want = torch.zeros(2, dtype=torch.float64)
    while not changes.enough:
        xs = [torch.randn(300, 16, generator=generator).bfloat16() for _ in range(3)]
        for layer, x in enumerate(xs):
            changes.see(layer, x)
            if layer:
                one, other = (part[:256].double() for part in (xs[layer - 1], x))
                want[layer - 1] += (1 - ((one * other).sum(1) / one.norm(dim=1) / other.norm(dim=1)) ** 2).sum()
            changes.see(3, x)  # the layer of a draft model
    assert changes.parts() == pytest.approx((want * (1 << 20)).tolist(), rel=1e-4)
    before = changes.parts()
    changes.see(1, xs[0])
    assert changes.parts() == before


def test_dynaexq_measures_it_once():
    server = dynaexq(STORES[True])
    migration, experts = server.host_planned.migration, server.experts
    assert migration._worth[:, 0].tolist() == [1, 1, 1]
    for step in range(24):
        server.host_planned.begin_step(Phase.DECODE)
        for layer in range(3):
            x, weights, ids = random_step(step, 64, experts)
            if layer:  # the first layer changes the direction of its tokens, the second hardly does
                x = random_step(step + 100, 64, experts)[0] * (1 if layer == 1 else 1.01)
            server.host_planned.forward(Routing(layer, 3, x, ids, weights))
    first, second, third = migration._worth[:, 0].tolist()
    assert first > 20 * second
    assert second == third > 0
    assert np.mean([first, second]) == pytest.approx(1, rel=0.01)
    server.engine.close()
