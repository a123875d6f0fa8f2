"""The threshold's controller: where it settles, and its bounds.

tests/kernels checks that host and device agree.
"""

import numpy as np
import pytest
import torch

from vllm_dymoe.planner.importance import importance
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.threshold import MOST, above, follow, threshold_for
from vllm_dymoe.policies.dymoe import Dymoe

RETENTIONS = (0.1, 0.25, 0.5, 0.75)


def shares(generator, tokens, top_k, experts=32):
    """Return one step's sums of routing weights, one for each active expert."""
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.softmax(torch.randn(tokens, top_k, generator=generator), 1)
    return importance(ids, weights, experts)[1].sums


def step(threshold, sums):
    high = above(threshold, sums)
    follow(threshold, int(high.sum()), len(sums))
    return high.mean()


@pytest.mark.parametrize("retention", RETENTIONS)
def test_steps_that_cannot_meet_the_retention_leave_the_threshold_where_it_is(retention):
    """With fewer than 1 / retention active experts, one high expert is too many.

    At least one expert is always high, so such steps would push the threshold up without end.
    """
    threshold = threshold_for(retention)
    before = threshold.copy()
    for active in range(1, int(np.ceil(1 / retention))):
        for _ in range(100):
            follow(threshold, 1, active)
    assert threshold.tolist() == before.tolist()
    follow(threshold, int(1 / retention) + 1, int(1 / retention) + 1)
    assert threshold[0] > before[0], "where it can be met the threshold follows"


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_batch_after_many_single_tokens_is_served_as_one_before_them(top_k, retention):
    """Single tokens do not wind up the controller.

    Once they did: after 400 of them, a batch of 8 got a fifth of its high experts for 143 steps.
    """
    generator, settled = torch.Generator().manual_seed(0), threshold_for(retention)
    for _ in range(600):
        step(settled, shares(generator, 8, top_k))
    wound = settled.copy()
    for _ in range(400):
        step(wound, shares(generator, 1, top_k))
    high = np.mean([step(wound, shares(generator, 8, top_k)) for _ in range(20)])
    assert high == pytest.approx(retention, abs=0.2)
    assert high > retention / 2


def test_the_integrator_is_bounded():
    """The bound is the largest initial threshold.

    A higher value would only take longer to come back.
    """
    threshold = threshold_for(0.05)
    for _ in range(5000):
        follow(threshold, 100, 100)
    assert int(threshold[0]) == MOST == int(threshold_for(0)[0])
    for _ in range(5000):
        follow(threshold, 0, 100)
    assert int(threshold[0]) >= 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_row_that_is_not_finite_moves_no_threshold(poison):
    generator = torch.Generator().manual_seed(0)
    served, alone = Dymoe(retention=0.5), Dymoe(retention=0.5)
    for _ in range(50):
        ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(3)])
        weights = torch.softmax(torch.randn(3, 4, generator=generator), 1)
        want = alone.precision.select(Routing(0, 1, torch.zeros(2, 8), ids[:2], weights[:2]))
        weights[2] = poison
        found = served.precision.select(Routing(0, 1, torch.zeros(3, 8), ids, weights))
        assert {expert: found[expert] for expert in want} == want, "nor changes what other requests get"
    assert [of.tolist() for of in served.precision.thresholds] == [of.tolist() for of in alone.precision.thresholds]
