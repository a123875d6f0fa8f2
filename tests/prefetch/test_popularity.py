from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.prefetch.popularity import Popularity

X = torch.zeros(1, 1)


def see(predictor, layer, ids, phase=Phase.DECODE):
    ids = torch.tensor(ids)
    predictor.observe(Routing(layer, 9, X, ids, torch.ones(ids.shape), phase))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-1, 5), min_size=2, max_size=2)), max_size=40))
def test_shares_are_those_of_equation_2(observed):
    """Without decay; -1 stands for an expert of another rank."""
    predictor = Popularity(3, 6, decode_experts=6, half_life=float("inf"))
    counts = [Counter() for _ in range(3)]
    for layer, ids in observed:
        see(predictor, layer, [ids])
        counts[layer].update(expert for expert in ids if expert >= 0)
    for layer in (0, 1):
        wanted = counts[layer + 1]
        candidates = predictor.predict(layer)
        assert [wanted[c.expert] for c in candidates] == sorted(wanted.values(), reverse=True)
    assert predictor.predict(2) == []


def test_counts_are_exact_where_models_are_built_in_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    try:
        predictor = Popularity(2, 4, decode_experts=2, half_life=float("inf"))
    finally:
        torch.set_default_dtype(torch.float32)
    for place in range(600):
        see(predictor, 1, [[0, 1 + place % 2]])
    assert predictor.predict(0)[0].expert == 0
    assert predictor._counts[1].tolist() == [600, 300, 300, 0]


def test_old_favourites_fade():
    predictor = Popularity(2, 4, decode_experts=1, half_life=10)
    for _ in range(100):
        see(predictor, 1, [[0, 1]])
    for _ in range(20):
        see(predictor, 1, [[2, 3]])
    assert predictor.predict(0)[0].expert in (2, 3)


def test_a_prefill_is_told_of_more_than_a_decode_step():
    predictor = Popularity(2, 8, decode_experts=2)
    see(predictor, 1, [[0, 1], [0, 2], [3, 4]])
    see(predictor, 0, [[0, 1]])
    assert len(predictor.predict(0)) == 2
    see(predictor, 0, [[0, 1], [2, 3]], Phase.PREFILL)
    assert {candidate.expert for candidate in predictor.predict(0)} == {0, 1, 2, 3, 4}


def test_the_first_layer_is_foreseen_for_the_phase_that_begins():
    """No router has run yet, and the phase of the last step does not matter."""
    predictor = Popularity(2, 8, decode_experts=2)
    see(predictor, 0, [[0, 1], [0, 2], [3, 4]])
    predictor.begin_step(Phase.PREFILL)
    assert {candidate.expert for candidate in predictor.predict(-1)} == {0, 1, 2, 3, 4}
    see(predictor, 0, [[0, 1], [2, 3]], Phase.PREFILL)
    predictor.begin_step(Phase.DECODE)
    assert len(predictor.predict(-1)) == 2
