import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.prefetch import Gate


def naive_choice(logits, top_k, scoring, correction, groups, top_groups):
    """Choose experts as DeepSeek-V3 does, one token at a time, in plain Python."""
    scores = [1 / (1 + torch.exp(-v)) if scoring == "sigmoid" else torch.exp(v) for v in logits]
    if scoring == "softmax":
        scores = [score / sum(scores) for score in scores]
    biased = [float(s + b) for s, b in zip(scores, correction or itertools.repeat(0.0), strict=False)]
    allowed = range(len(biased))
    if groups:
        size = len(biased) // groups
        members = [range(g * size, (g + 1) * size) for g in range(groups)]

        def of_group(group):
            best = sorted((biased[e] for e in members[group]), reverse=True)
            return sum(best[: 2 if correction else 1])

        allowed = [e for g in sorted(range(groups), key=of_group, reverse=True)[:top_groups] for e in members[g]]
    return set(sorted(allowed, key=lambda e: biased[e], reverse=True)[:top_k])


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from([(0, 0), (1, 1), (4, 1), (4, 2), (4, 4), (2, 1)]),
)
def test_the_choice_is_that_of_a_naive_router(seed, scoring, corrected, grouping):
    groups, top_groups = grouping
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 16, generator=generator)
    correction = torch.randn(16, generator=generator) if corrected else None
    gate = Gate(lambda x: x, scoring, correction, groups, top_groups)
    ours = gate.scores(logits).topk(4, dim=-1).indices
    for token in range(5):
        expected = naive_choice(
            logits[token], 4, scoring, correction.tolist() if corrected else None, groups, top_groups
        )
        assert set(ours[token].tolist()) == expected


def test_agreement_counts_choices_that_the_gate_would_not_have_made():
    gate = Gate(lambda x: x)
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    assert gate.agreement(logits, torch.tensor([[1, 0], [3, 2]])) == 1
    assert gate.agreement(logits, torch.tensor([[1, 2], [3, 2]])) == 0.75
    assert gate.agreement(logits, torch.tensor([[0, 1], [0, 1]])) == 0.5


def test_equal_scores_are_interchangeable():
    assert Gate(lambda x: x).agreement(torch.zeros(3, 8), torch.tensor([[7, 1], [0, 5], [2, 3]])) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_of_another_rank_are_not_compared(rank):
    local = tuple(expert // 2 if expert % 2 == rank else -1 for expert in range(6))
    gate = Gate(lambda x: x, local=local)
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    chosen = logits.topk(3, dim=-1).indices
    here = torch.tensor(local)[chosen]
    assert (here < 0).any()
    assert gate.agreement(logits, here) == 1
    other = torch.where(here >= 0, (here + 1) % 3, here)
    assert gate.agreement(logits, other) < 0.9
