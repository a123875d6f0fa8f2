"""The planner in C++ gives the specification's plan and state, bit for bit.

The state is that of scores and thresholds.
"""

import ctypes
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_steps import COSTS, EXPERTS, LAYERS, TOKENS, make_table, random_step, rows
from tests.support.decode_steps import TOP_K as TABLE_TOP_K
from tests.support.recorded_routing import EXPERTS as RECORDED_EXPERTS
from tests.support.recorded_routing import TOP_K, recorded_steps
from vllm_dymoe.executor.cpu_executor import FOREVER, native_table
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.native import Outcome
from vllm_dymoe.planner.constants import AGING, USE, Action, Eviction
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.rule import HIGH, LOW, actions_of
from vllm_dymoe.planner.small_batch import plan_small_batch
from vllm_dymoe.planner.table import Table
from vllm_dymoe.policies.dymoe import Dymoe

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built")


AGED_TO_ONE_USE = 69905
assert AGED_TO_ONE_USE - (AGED_TO_ONE_USE >> AGING) == USE


class NativePlanner:
    """Plan with the library on a copy of a table."""

    def __init__(self, table):
        self.table = Table(**{f.name: np.array(getattr(table, f.name).numpy()) for f in fields(table)})
        table, self.library = self.table, native.load()
        self.call = call = native.MoeLayer(plans_only=True, evicts=Eviction.COLDEST, admits=True, observed=True)
        call.table = native_table(table, table.prompt_threshold, table.threshold)
        self.until = np.full((table.layers, table.experts, 3), FOREVER)
        call.in_memory_until, call.lost_pages = self.until.ctypes.data, self.library.lost_pages()
        n = table.experts
        self.experts, self.wanted = np.full(n, -7, np.int32), np.full(n, -7, np.int8)
        self.places = np.full(n * len(table.slot), -7, np.int64)
        call.experts, call.wanted, call.places = (a.ctypes.data for a in (self.experts, self.wanted, self.places))

    def plan(self, layer, ids, weights, *, executes=True, marks=None):
        call, ids, weights = self.call, ids.contiguous(), weights.contiguous()
        call.layer, call.executes, (call.tokens, call.top_k) = layer, executes, ids.shape
        call.ids, call.weights, call.wide_ids = ids.data_ptr(), weights.data_ptr(), ids.dtype is torch.int64
        call.marks = 0 if marks is None else marks.data_ptr()
        actions = torch.full(ids.shape, 77, dtype=torch.uint8)
        call.actions = actions.data_ptr()
        outcome = self.library.moe_layer(ctypes.addressof(call), self.library.isa, None)
        assert outcome == Outcome.FETCH  # the value that a call that only plans returns
        n, slices = call.count, len(self.table.slot)
        places = self.places[: n * slices].reshape(slices, n)
        return self.experts[:n].astype(np.int64), self.wanted[:n].copy(), places.copy(), actions


def check_step(planner, table, layer, ids, weights, *, large=False, marks=None):
    """Run one step with both, and check that the tables are equal afterwards."""
    held = planner.table.precision[layer].copy()
    experts, wanted, places, actions = planner.plan(layer, ids, weights, executes=not large, marks=marks)
    assert np.array_equal(actions.numpy(), actions_of(ids.numpy(), experts, wanted, held, places)) or not len(experts)
    planner.table.keep(layer, experts, wanted, places)
    plan = LayerPlan.allocate(len(ids), ids.shape[1], table.experts, "cpu", slices=len(table.slot))
    plan_small_batch(table, layer, ids, weights, rows(len(ids)), plan, large=large, marks=marks)
    count = int(plan.count)
    assert plan.experts[:count].tolist() == experts.tolist()
    for name in ("precision", "slot", "score", "used_at", "step", "threshold", "prompt_threshold"):
        theirs = getattr(table, name).numpy()
        assert np.array_equal(getattr(planner.table, name), theirs), name
    there = (plan.action[:, :count] == Action.CPU).any(0).tolist()
    assert there == (action_of_each(actions, ids, experts) & 7 == Action.CPU).tolist()


def action_of_each(actions, ids, experts):
    """Return the action of each expert, which all of its pairs share."""
    return np.array([int(actions[ids == expert][0]) for expert in experts], np.uint8)


share = st.integers(0, EXPERTS)
steps_strategy = st.lists(
    st.tuples(
        st.integers(0, LAYERS - 1), st.integers(1, TOKENS), st.integers(0, 1 << 30), st.booleans(), st.booleans()
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    steps_strategy,
    st.lists(share, min_size=LAYERS, max_size=LAYERS),
    st.lists(share, min_size=LAYERS, max_size=LAYERS),
    st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    st.sampled_from(["threshold", "depth"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(COSTS)),
)
def test_any_steps_are_planned_alike(steps, low, high, retention, high_by, reuse_high, skip_low, nested, costs):
    policy = Dymoe(retention=retention, high_by=high_by, reuse_high=reuse_high)
    table = make_table({LOW: low, HIGH: high}, policy=policy, skip_low=skip_low, nested=nested, costs=COSTS[costs])
    planner = NativePlanner(table)
    for layer, tokens, seed, large, marked in steps:
        ids, weights = random_step(seed, tokens)
        if seed % 3 == 0 and tokens > 2:  # rows that are not finite must not affect any statistic
            weights[0, seed % TABLE_TOP_K] = (float("nan"), float("inf"), -float("inf"), 1e9)[seed % 4]
        if seed % 5 == 0:  # after one step it is as hot as a never-used expert was before
            score = np.random.default_rng(seed).choice([0, AGED_TO_ONE_USE], table.score.shape)
            table.score.copy_(torch.from_numpy(score))
            planner.table.score[:] = score
        marks = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, tokens).astype(np.int8)) if marked else None
        check_step(planner, table, layer, ids.int() if seed % 2 else ids, weights, large=large, marks=marks)


@pytest.mark.parametrize("costs", sorted(COSTS))
@pytest.mark.parametrize("batch", [1, 6])
def test_recorded_routing_is_planned_alike(costs, batch):
    """Real routers have favourites, so layers keep some experts and evict the rest."""
    quotas = {LOW: [4] * LAYERS, HIGH: [6] * LAYERS}
    table = make_table(quotas, policy=Dymoe(retention=0.5), experts=RECORDED_EXPERTS, costs=COSTS[costs], top_k=TOP_K)
    planner, steps = NativePlanner(table), 0
    for layer, ids, weights in recorded_steps(batch):
        check_step(planner, table, layer, ids, weights)
        steps += 1
    assert steps > 20


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1 << 30)), max_size=30), share)
def test_other_orders_of_eviction(steps, quota):
    for evicts in (Eviction.FIRST_IN, Eviction.LEAST_RECENT):
        table = make_table({LOW: [0, 0], HIGH: [quota, quota]}, policy=Dymoe(retention=1))
        planner = NativePlanner(table)
        planner.call.evicts = table.evicts[0] = evicts
        host = Table(**{f.name: np.array(getattr(table, f.name).numpy()) for f in fields(table)})
        for layer, seed in steps:
            ids, weights = random_step(seed, 2)
            experts, wanted, places, _ = planner.plan(layer, ids, weights)
            assert np.array_equal(host.begin_step(layer, experts, wanted), places)
            for one in (host, planner.table):
                one.keep(layer, experts, wanted, places)
            assert np.array_equal(host.score, planner.table.score)
            assert np.array_equal(host.used_at, planner.table.used_at)


def test_a_number_that_is_no_expert_changes_nothing():
    table = make_table({LOW: [2, 2], HIGH: [2, 2]})
    planner = NativePlanner(table)
    for ids in (torch.tensor([[0, 1, EXPERTS]]), torch.tensor([[0, 1, 65536]])):
        call, weights = planner.call, torch.ones(1, 3)
        call.tokens, call.top_k, call.ids, call.weights = 1, 3, ids.data_ptr(), weights.data_ptr()
        call.wide_ids = True
        assert planner.library.moe_layer(ctypes.addressof(call), planner.library.isa, None) == Outcome.BAD_EXPERT
        assert call.bad_expert == ids[0, 2]
        assert not planner.table.step.any()


def test_bytes_that_were_never_checked_are_asked_for_before_anything_changes():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, policy=Dymoe(retention=1), costs=COSTS["compute"])
    planner = NativePlanner(table)
    planner.until[0, 1:3, HIGH] = 0
    ids, weights, call = torch.tensor([[0, 1, 2]]), torch.ones(1, 3), planner.call
    call.layer, call.tokens, call.top_k, call.executes = 0, 1, 3, True
    call.ids, call.weights, call.wide_ids = ids.data_ptr(), weights.data_ptr(), True
    assert planner.library.moe_layer(ctypes.addressof(call), planner.library.isa, None) == Outcome.VERIFY
    assert np.argwhere(planner.until == -2).tolist() == [[0, 1, HIGH], [0, 2, HIGH]]
    assert not planner.table.step.any()
    planner.until[0, 1, HIGH], planner.until[0, 2, HIGH] = FOREVER, -1
    experts, _wanted, places, _ = planner.plan(0, ids, weights)
    assert experts.tolist() == [0, 1, 2]
    assert places.tolist() == [[-4, -4, -2]], "what is on disk is fetched"
    assert planner.until[0, 2, HIGH] == 0, "and checked when it is in memory again"
