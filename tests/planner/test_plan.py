"""Plans made on the host: their decisions, and the parts that executors use."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import group_by_expert
from vllm_dymoe.planner.rule import CPU, FREE, HIGH, HIT, LOW, STREAM

IDS = np.array([[3, 0], [5, 3], [-1, 3]])  # the third token's first expert belongs to another rank


def plan_of(experts, wanted, places, **told):
    arrays = np.array(experts), np.array(wanted, np.int8), np.array(places, np.int64)
    return LayerPlan.on_host(group_by_expert(IDS), *arrays, **told)


def test_a_plan_has_an_action_and_a_victim_for_each_slice():
    plan = plan_of([0, 3, 5], [LOW, HIGH, HIGH], [[HIT, 4, CPU], [HIT, STREAM, CPU]])
    assert plan.wanted == {0: Precision.LOW, 3: Precision.HIGH, 5: Precision.HIGH}
    assert plan.action.tolist() == [
        [Action.HIT, Action.ADMIT, Action.CPU],
        [Action.HIT, Action.STREAM, Action.CPU],
    ]
    assert plan.victims.tolist() == [[-1, 4, -1], [-1, -1, -1]]
    assert plan.on_cpu == [2]
    free = plan_of([0, 3, 5], [HIGH] * 3, [[FREE, 0, STREAM]])
    assert free.action.tolist() == [[Action.ADMIT, Action.ADMIT, Action.STREAM]]
    assert free.victims.tolist() == [[-1, 0, -1]], "expert 0 is a victim, and -1 is a free slot"


@pytest.mark.parametrize("row_for_each_pair", [False, True])
def test_skipped_experts_have_no_positions(row_for_each_pair):
    plan = plan_of([0, 3], [HIGH, HIGH], [[HIT, HIT]], row_for_each_pair=row_for_each_pair)
    assert plan.bounds == [0, 1, 4]
    assert plan.pairs.tolist() == [1, 0, 3, 5]
    assert plan.rows.tolist() == (plan.pairs.tolist() if row_for_each_pair else [0, 0, 1, 2])
    assert len(plan_of([], [], np.empty((1, 0))).views) == 0


@given(st.lists(st.integers(0, 2), unique=True))
def test_a_part_computes_its_items_in_the_order_given(items):
    plan = plan_of([0, 3, 5], [LOW, HIGH, HIGH], [[FREE, 4, HIT]])
    plan.place(1, view := object())
    part = plan.select(items)
    for place, item in enumerate(items):
        own, whole = (slice(of.bounds[n], of.bounds[n + 1]) for of, n in ((part, place), (plan, item)))
        assert torch.equal(part.rows[own], plan.rows[whole])
        assert torch.equal(part.pairs[own], plan.pairs[whole])
        for name in ("precisions", "action", "victims", "experts"):
            assert np.array_equal(getattr(part, name)[..., place], getattr(plan, name)[..., item])
        assert part.views[place] is (view if item == 1 else None)
    assert (len(part.views), part.bounds[-1]) == (len(items), len(part.pairs))
