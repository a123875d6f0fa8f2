"""Eqs. 2 and 3 against their definitions, written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.residency.constants import WEIGHT_UNIT
from vllm_dymoe.residency.importance import Importance, importance
from vllm_dymoe.residency.routing import PromptTokens


def naive(ids, weights):
    """By expert: its tokens, and the sum of their weights."""
    found = {}
    for experts, shares in zip(ids.tolist(), weights.tolist(), strict=True):
        for expert, weight in zip(experts, shares, strict=True):
            if expert >= 0:
                hits, total = found.get(expert, (0, 0.0))
                found[expert] = hits + 1, total + weight
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
    rows = torch.rand(tokens, generator=generator) < 0.5
    if not mixed:
        rows.fill_(mixed is False)
    prompt = None if mixed is None else PromptTokens(rows, bool(mixed))
    prompts, others = importance(ids, weights, 7, prompt)
    assert naive(ids[rows], weights[rows]) == told(prompts)
    decoded = naive(ids[~rows], weights[~rows])
    assert {expert: (0, total) for expert, (_, total) in decoded.items()} == told(others)


def test_sums_do_not_depend_on_the_order_of_tokens():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (400, 2), generator=generator)
    weights = torch.rand(400, 2, generator=generator) ** 8
    order = torch.randperm(400, generator=generator)
    one, other = (importance(ids[at], weights[at], 5)[1] for at in (slice(None), order))
    assert all(map(np.array_equal, one, other))


def test_tokens_count_first_then_their_weights_then_the_lower_number():
    numbers = np.array([1, 3, 5, 7, 9])
    some = Importance(numbers, np.array([1, 1, 2, 0, 1]), np.array([4, 6, 1, 99, 6]))
    assert [numbers[some.first(count)].tolist() for count in range(5)] == [[], [5], [3, 5], [3, 5, 9], [1, 3, 5, 9]]
