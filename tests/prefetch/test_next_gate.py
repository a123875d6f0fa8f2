from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.prefetch.gates import random_gates, random_inputs
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.prefetch import Gate
from vllm_dymoe.prefetch.next_gate import NextGate

NO_IDS = torch.zeros(0, 0, dtype=torch.int32)


def ask(predictor, layer, x, phase):
    predictor.observe(Routing(layer, 9, x, NO_IDS, NO_IDS, phase))
    return predictor.predict(layer)


def best_of(weight, x, k):
    """Return the best experts by Eq. 6, in plain Python."""
    scores = torch.softmax(x @ weight.T, -1).tolist()
    order = sorted(range(len(scores)), key=lambda expert: scores[expert], reverse=True)
    return {expert: scores[expert] for expert in order[:k]}


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 2))
def test_decode_names_the_t_best_of_the_next_gate(seed, t, layer):
    gates, weights = random_gates(4, 8, 5, seed)
    x = random_inputs(1, 1, 5, seed)[0]
    candidates = ask(NextGate(gates, top_k=t), layer, x, Phase.DECODE)
    expected = best_of(weights[layer + 1], x[0], t)
    assert [candidate.expert for candidate in candidates] == list(expected)
    assert {candidate.layer for candidate in candidates} == {layer + 1}


@given(st.integers(0, 1000), st.integers(2, 12))
def test_prefill_names_the_experts_that_most_tokens_would_choose(seed, tokens):
    gates, weights = random_gates(2, 8, 5, seed)
    x = random_inputs(1, tokens, 5, seed)[0]
    candidates = ask(NextGate(gates, top_k=3), 0, x, Phase.PREFILL)
    counts = Counter(expert for row in x for expert in best_of(weights[1], row, 3))
    assert [counts[candidate.expert] for candidate in candidates] == sorted(counts.values(), reverse=True)


def test_decode_looks_as_many_layers_ahead_as_it_is_asked_to():
    gates, weights = random_gates(5, 8, 5)
    x = random_inputs(1, 1, 5)[0]
    predictor = NextGate(gates, top_k=2, layers=3)
    for layer, coming in ((0, (1, 2, 3)), (3, (4,)), (4, ())):
        candidates = ask(predictor, layer, x, Phase.DECODE)
        expected = [(later, expert) for later in coming for expert in best_of(weights[later], x[0], 2)]
        assert [(candidate.layer, candidate.expert) for candidate in candidates] == expected
    assert {candidate.layer for candidate in ask(predictor, 0, x, Phase.PREFILL)} == {1}


def test_experts_of_other_ranks_are_not_named():
    gate = Gate(lambda x: x, local=(-1, 0, -1, 1))
    x = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    candidates = ask(NextGate([gate, gate], top_k=3), 0, x, Phase.DECODE)
    assert candidates == [(1, 0)]
