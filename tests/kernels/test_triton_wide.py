"""The programs around a wide step against their plain twin: every list, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kernels.sections import DEVICE
from tests.kernels.twins import moved
from tests.support.decode_steps import LAYERS, make_table, random_step, rows
from vllm_dymoe.kernels.triton.wide import plan_wide
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.decode_rule import decide_plain
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.wide_rule import WideShape, WideWork, plan_wide_plain
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.exact import Exact

STEPS = 2, 4, 8


def of_shape(shape, place):
    decision = Decision.allocate(
        shape.tokens, shape.top_k, shape.experts, "cpu", slices=shape.slices, scratch=shape.scratch
    )
    wide = WideWork.allocate(shape, STEPS, "cpu")
    return moved(decision, place), moved(wide, place)


class Twins:
    """Two tables in the same state, one for each writing."""

    def __init__(self, shares, **options):
        self.plain = make_table(shares, **options)
        self.table = moved(self.plain, lambda values: values.to(DEVICE, copy=True))

    def step(self, layer, ids, weights, shape, half, real, marks=None, ahead=0):
        decision, wide = of_shape(shape, lambda values: values)
        found, lists = of_shape(shape, lambda values: values.to(DEVICE, copy=True).fill_(77))
        found.bits[-1] = 0
        decide_plain(self.plain, layer, ids, weights, rows(real), decision, wide=True, marks=marks)
        plan_wide_plain(self.plain, layer, ids, decision, shape, half, ahead, STEPS, wide)
        there = [values.to(DEVICE) for values in (ids, weights, rows(real))]
        plan_wide(vars(self.table), layer, *there, found.tensors, shape, half, ahead, STEPS, vars(lists), marks)
        copies = shape.spans(shape.groups if ahead else shape.groups - 1).stop if shape.passes else shape.items
        for name, values in vars(wide).items():
            mine = slice(copies if name == "spans" else None)
            assert torch.equal(values[mine], getattr(lists, name)[mine].cpu()), name
        count = int(decision.count)
        assert int(found.count) == count
        pairs = int((wide.ids >= 0).sum())
        for name in ("rows", "pairs"):
            assert torch.equal(getattr(decision, name)[:pairs], getattr(found, name)[:pairs].cpu()), name
        for name in ("addresses", "fate"):
            assert torch.equal(getattr(decision, name)[:, :count], getattr(found, name)[:, :count].cpu()), name
        assert not found.bits[-1].any()
        self.compare()
        return decision, wide

    def compare(self):
        for name, values in vars(self.plain).items():
            assert torch.equal(values, getattr(self.table, name).cpu()), name


@settings(
    max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1 << 30)), min_size=2, max_size=5),
    st.integers(0, 8),
    st.integers(0, 8),
    st.sampled_from([0.3, 1.0]),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 4),
    st.sampled_from(["threshold", "depth"]),
)
def test_any_steps(steps, low, high, retention, nested, staging, passes, high_by):
    system = Dymoe(retention=retention, high_by=high_by) if nested or retention < 1 else Exact()
    shares = {LOW: [low] * LAYERS, HIGH: [min(low, high) if nested else high] * LAYERS}
    twins = Twins(shares, system=system, staging=staging, nested=nested)
    half = staging // 2
    for number, (tokens, seed) in enumerate(steps):
        ids, weights = random_step(seed, tokens)
        marks = (torch.arange(tokens) * seed % 7 % 3).to(torch.int8) if seed % 3 else None
        shape = WideShape(tokens, 3, 12, 1 + nested, half if passes else 0, passes if half else 0, marks is not None)
        layer, real = number % LAYERS, seed % (tokens + 1)
        ahead = HIGH if seed % 2 and not nested and shape.half and layer + 1 < LAYERS else 0
        twins.step(layer, ids, weights, shape, (number + 1) % 2, real, marks, ahead)


@pytest.mark.parametrize(("experts", "top_k", "tokens", "nested"), [(512, 10, 40, False), (33, 4, 700, True)])
def test_sizes_of_models(experts, top_k, tokens, nested):
    """Of which the second one is counted in several chunks."""
    shares = {LOW: [experts // 2] * LAYERS, HIGH: [experts // 4] * LAYERS}
    options = {"experts": experts, "top_k": top_k, "nested": nested}
    twins = Twins(shares, system=Dymoe(retention=0.5), staging=8, **options)
    shape = WideShape(tokens, top_k, experts, 1 + nested, 4, 3)
    assert shape.chunks > 1 or tokens < 100
    for seed in range(2):
        twins.step(0, *random_step(seed, tokens, top_k, experts), shape, seed, tokens)
