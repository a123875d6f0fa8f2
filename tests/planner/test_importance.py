"""Eqs. 1 to 3 of DyMoE against naive implementations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.planner.constants import WEIGHT_UNIT
from vllm_dymoe.planner.importance import Importance, attention_mass, importance, mark_heavy_hitters
from vllm_dymoe.planner.routing import PromptTokens, Routing


def naive_mass(query, key, scale, window, reach=None):
    """Compute Eq. 1 for one query and one head at a time, in float64."""
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


@pytest.mark.parametrize(("share", "count"), [(0.2, 2), (0.21, 3), (1.0, 10), (0.01, 1)])
def test_the_share_of_heavy_hitters_is_rounded_up(share, count):
    heavy = heavy_hitters(torch.arange(10.0), share)
    assert heavy.nonzero().flatten().tolist() == list(range(10 - count, 10))


def naive(ids, weights, heavy):
    """Return for each expert: its heavy-hitter tokens, and their summed weights."""
    found = {}
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(experts, shares, strict=True):
            if expert >= 0:
                hits, total = found.get(expert, (0, 0.0))
                found[expert] = hits + bool(heavy[row]), total + weight * bool(heavy[row])
    return found


def told(phase):
    numbers = zip(phase.used.tolist(), phase.hits.tolist(), (phase.sums / WEIGHT_UNIT).tolist(), strict=True)
    return {expert: (hits, pytest.approx(total, abs=1e-6)) for expert, hits, total in numbers}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 1000), st.sampled_from((None, False, True)))
def test_importance_against_its_definition(tokens, top_k, seed, mixed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(8, generator=generator)[:top_k] for _ in range(tokens)]).int() - 1
    weights = torch.rand(tokens, top_k, generator=generator)
    rows, heavy = torch.rand(2, tokens, generator=generator) < 0.5
    if not mixed:
        rows.fill_(mixed is False)
    prompt = None if mixed is None else PromptTokens(rows, heavy, bool(mixed))
    prompts, others = importance(ids, weights, 7, prompt)
    assert naive(ids[rows], weights[rows], heavy[rows]) == told(prompts)
    decoded = naive(ids[~rows], weights[~rows], torch.ones(tokens)[~rows])
    assert {expert: (0, total) for expert, (_, total) in decoded.items()} == told(others)


def test_sums_do_not_depend_on_the_order_of_tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (400, 2), generator=generator)
    weights = torch.rand(400, 2, generator=generator) ** 8
    order = torch.randperm(400, generator=generator)
    one, other = (importance(ids[at], weights[at], 5)[1] for at in (slice(None), order))
    assert all(map(np.array_equal, one, other))


def test_heavy_hitters_count_first_then_their_weights_then_the_lower_number():
    numbers = np.array([1, 3, 5, 7, 9])
    some = Importance(numbers, np.array([1, 1, 2, 0, 1]), np.array([4, 6, 1, 99, 6]), numbers > 0)
    assert [numbers[some.first(count)].tolist() for count in range(5)] == [[], [5], [3, 5], [3, 5, 9], [1, 3, 5, 9]]


def test_weights_of_16_bits_are_looked_at_as_others():
    ids, weights = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]).bfloat16()
    assert Routing(0, 1, torch.zeros(2, 8), ids, weights).uses.tolist() == [1, 2, 0]
