"""Eqs. 1 to 3 against their definitions, written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.residency.routing import PromptTokens
from vllm_dymoe.systems.importance import (
    attention_mass,
    gate_importance,
    mark_heavy_hitters,
    most_important,
    step_importance,
)


def naive_mass(query, key, scale, window, reach=None):
    """Eq. 1, one query and one head at a time, in float64."""
    tokens, heads, _ = query.shape
    group = heads // key.shape[1]
    mass = torch.zeros(tokens, dtype=torch.float64)
    asked = range(max(0, tokens - window), tokens)
    for head in range(heads):
        for place in asked:
            first = 0 if reach is None else max(0, place - reach + 1)
            seen = key[first : place + 1, head // group].double()
            mass[first : place + 1] += (seen @ query[place, head].double() * scale).softmax(0)
    return mass / (heads * len(asked))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([(4, 2), (4, 4), (6, 1), (1, 1)]),
    st.integers(1, 50),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([1, 300, 1 << 20]),
)
def test_the_mass_of_the_last_queries(tokens, heads, window, reach, at_once):
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, heads[0], 8, generator=generator)
    key = torch.randn(tokens, heads[1], 8, generator=generator)
    mass = attention_mass(query, key, 8**-0.5, window, reach, at_once)
    assert mass.sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(mass.double(), naive_mass(query, key, 8**-0.5, window, reach), rtol=1e-4, atol=1e-6)


def test_scores_of_16_bits_are_computed_in_32():
    query, key = torch.randn(40, 4, 8).bfloat16(), torch.randn(40, 2, 8).bfloat16()
    mass = attention_mass(query, key, 0.3, 16)
    assert torch.equal(mass, attention_mass(query.float(), key.float(), 0.3, 16))


def test_scores_are_held_for_a_few_heads_at_a_time(monkeypatch):
    """Memory does not grow with the number of heads."""
    sizes, product = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: sizes.append((out := product(a, b)).numel()) or out)
    query, key = torch.randn(500, 32, 8), torch.randn(500, 8, 8)
    attention_mass(query, key, 1.0, 16, at_once=100_000)
    assert max(sizes) <= 100_000
    assert sum(sizes) == 32 * 16 * 500


def heavy_hitters(mass, share):
    heavy = torch.zeros(len(mass), dtype=torch.bool)
    mark_heavy_hitters(mass, share, heavy)
    return heavy


def test_a_token_that_all_look_at_is_a_heavy_hitter():
    query = torch.ones(20, 2, 4)
    key = torch.zeros(20, 1, 4)
    key[[3, 11]] = 5
    mass = attention_mass(query, key, 1.0, 8)
    assert heavy_hitters(mass, 0.1).nonzero().flatten().tolist() == [3, 11]


@pytest.mark.parametrize(("share", "count"), [(0.2, 2), (0.21, 3), (1.0, 10), (0.01, 1)])
def test_the_share_of_heavy_hitters_is_rounded_up(share, count):
    heavy = heavy_hitters(torch.arange(10.0), share)
    assert heavy.nonzero().flatten().tolist() == list(range(10 - count, 10))


def naive(ids, weights, heavy):
    loads, sums = {}, {}
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(experts, shares, strict=True):
            if expert >= 0:
                loads[expert] = loads.get(expert, 0) + bool(heavy[row])
                sums[expert] = sums.get(expert, 0) + weight
    return loads, sums


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 1000), st.booleans())
def test_importance_against_its_definition(tokens, top_k, seed, other_ranks):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(7, generator=generator)[:top_k] for _ in range(tokens)]).int()
    if other_ranks:
        ids = torch.where(ids < 3, ids, -1)
    weights = torch.rand(tokens, top_k, generator=generator)
    heavy = torch.rand(tokens, generator=generator) < 0.3
    loads, sums = naive(ids, weights, heavy)
    decoded = step_importance(ids, weights, 7)
    assert decoded.gate == pytest.approx(sums, abs=1e-6)
    assert not decoded.load
    load, gate = step_importance(ids, weights, 7, PromptTokens(torch.ones_like(heavy), heavy, False))
    assert not gate
    assert {expert: count for expert, (count, _) in load.items()} == loads
    assert {expert: total for expert, (_, total) in load.items()} == pytest.approx(sums, abs=1e-6)


def test_one_token_is_its_routing_weights():
    """Eq. 3 as it stands."""
    ids, weights = torch.tensor([[5, 2, -1]]), torch.tensor([[0.5, 0.3, 0.2]])
    assert gate_importance(ids.numpy(), weights.numpy()) == pytest.approx({5: 0.5, 2: 0.3})
    assert step_importance(ids, weights, 6).gate == pytest.approx({5: 0.5, 2: 0.3})


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 1000))
def test_of_a_mixed_step_each_phase_is_measured_over_its_own_tokens(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(tokens)]).int() - 1
    weights = torch.rand(tokens, 3, generator=generator)
    rows, heavy = torch.rand(2, tokens, generator=generator) < 0.5
    load, gate = step_importance(ids, weights, 8, PromptTokens(rows, heavy, True))
    loads, sums = naive(ids[rows], weights[rows], heavy[rows])
    assert {expert: count for expert, (count, _) in load.items()} == loads
    assert {expert: total for expert, (_, total) in load.items()} == pytest.approx(sums, abs=1e-6)
    assert gate == pytest.approx(naive(ids[~rows], weights[~rows], heavy[~rows])[1], abs=1e-6)


def test_sums_do_not_depend_on_the_order_of_tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (400, 2), generator=generator)
    weights = torch.rand(400, 2, generator=generator) ** 8
    order = torch.randperm(400, generator=generator)
    assert step_importance(ids, weights, 5) == step_importance(ids[order], weights[order], 5)


def test_of_equal_experts_the_lower_numbers_come_first():
    assert most_important({9: 1.0, 3: 1.0, 5: 2.0, 1: 0.5}, 2) == {5, 3}
    assert most_important({4: (1, 0.2), 2: (1, 0.9), 7: (0, 5.0)}, 1) == {2}
    assert most_important({1: math.inf}, 0) == set()
