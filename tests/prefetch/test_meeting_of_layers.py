from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.prefetch.gates import random_gates, random_inputs
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.prefetch import Gate
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.tuner import Heop, Setting

LAYERS, EXPERTS, HIDDEN = 5, 12, 6
NO_IDS = torch.zeros(0, 0, dtype=torch.int32)


def step(predictor, inputs, phase=Phase.DECODE, ids=None):
    named = []
    for layer, x in enumerate(inputs):
        wanted = torch.zeros(len(x), 1, dtype=torch.int32) if ids is None else ids[layer]
        predictor.observe(Routing(layer, 9, x, wanted, torch.ones(wanted.shape), phase))
        named.append(predictor.predict(layer))
        x.fill_(torch.nan)  # others may overwrite the memory from now on
    return named


def intersection(weights, inputs, layer, token, k, p):
    """Return the predicted set for one token by Eqs. 5 and 6, in plain Python."""
    sets = []
    for m in range(max(0, layer - p), layer):
        scores = (weights[layer] @ inputs[m][token]).tolist()
        sets.append(set(sorted(range(EXPERTS), key=lambda expert: scores[expert], reverse=True)[:k]))
    return set.intersection(*sets)


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_it_is_the_intersection(seed, k, p, tokens):
    gates, weights = random_gates(LAYERS, EXPERTS, HIDDEN, seed)
    inputs = random_inputs(LAYERS, tokens, HIDDEN, seed)
    inputs += inputs.mean(0) * 4  # so that layers agree on some experts
    predictor = MeetingOfLayers(gates, k, p)
    for _ in range(2):  # the second step must not use layers of the first
        named = step(predictor, [x.clone() for x in inputs])
        assert named[-1] == []
        for layer in range(1, LAYERS):
            counts = Counter(expert for t in range(tokens) for expert in intersection(weights, inputs, layer, t, k, p))
            candidates = named[layer - 1]
            assert {candidate.layer for candidate in candidates} <= {layer}
            assert {candidate.expert for candidate in candidates} == set(counts)
            if tokens > 1:
                assert [counts[expert] for _, expert in candidates] == sorted(counts.values(), reverse=True)


def test_with_one_layer_it_is_the_next_gate():
    from vllm_dymoe.prefetch.next_gate import NextGate

    gates, _ = random_gates(3, 8, 5)
    x = random_inputs(1, 4, 5)[0]
    for phase in Phase:
        answers = []
        for predictor in (MeetingOfLayers(gates, 3, 1), NextGate(gates, top_k=3)):
            predictor.observe(Routing(0, 9, x, torch.zeros(4, 3, dtype=torch.int32), torch.ones(4, 3), phase))
            answers.append(predictor.predict(0))
        assert answers[0] == answers[1]


class Told:
    largest = Setting(2, 2)

    def __init__(self):
        self.records, self.steps = [], 0

    def setting(self, layer):
        return Setting(2, 1)

    def record(self, layer, *, unused, missed, hits):
        self.records.append((layer, unused, missed, hits))

    def end_step(self):
        self.steps += 1


def test_the_tuner_hears_of_every_layer_that_was_foreseen():
    gate = Gate(lambda x: x)
    tuner, held = Told(), {1: {1, 3}, 2: {0, 2, 3}}  # resident experts are predicted without a transfer
    predictor = MeetingOfLayers([gate] * 3, 2, 1, tuner, held.__getitem__)
    x = torch.tensor([[4.0, 3.0, 2.0, 1.0]])  # the gate of every layer predicts experts 0 and 1
    ids = [torch.tensor([chosen]) for chosen in ([0, 1, 2], [1, 2, 3], [2, 3, 2])]
    step(predictor, [x.clone() for _ in range(3)], ids=ids)
    assert tuner.records == [(1, 1, 2, 2), (2, 1, 2, 2)]
    step(predictor, list(torch.randn(3, 6, 4)), Phase.PREFILL)
    assert (len(tuner.records), tuner.steps) == (2, 1), "a prompt teaches it nothing"


def test_a_layer_that_was_not_asked_about_teaches_the_tuner_nothing():
    tuner = Told()
    predictor = MeetingOfLayers([Gate(lambda x: x)] * 4, 2, 1, tuner)
    for layer in range(4):
        predictor.observe(Routing(layer, 4, torch.randn(1, 4), torch.tensor([[0, 1]]), torch.ones(1, 2)))
        if layer == 0:
            predictor.predict(layer)
    assert [record[0] for record in tuner.records] == [1]
    assert tuner.steps == 1


def test_a_tuner_changes_how_many_meet():
    gates, weights = random_gates(LAYERS, EXPERTS, HIDDEN)
    inputs = random_inputs(LAYERS, 1, HIDDEN)
    inputs[1:] += 2 * inputs[1:].mean(0)
    want = [intersection(weights, inputs, 4, 0, 5, p) for p in (1, 3, 4)]
    assert len(want[0]) > len(want[1]) > len(want[2])
    tuner = Heop(LAYERS, Setting(6, 1), Setting(6, 4))
    predictor = MeetingOfLayers(gates, 6, 1, tuner)
    for group in tuner._groups:
        group.setting = Setting(5, 3)
    named = step(predictor, [x.clone() for x in inputs])
    assert {candidate.expert for candidate in named[3]} == want[1]


def test_a_long_prompt_is_asked_about_by_some_of_its_tokens():
    """The inputs of all tokens would take too much memory besides the budget.

    For six layers of Mixtral and 8,192 tokens these are 400 MB.
    """
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    inputs = random_inputs(LAYERS, 4000, HIDDEN)
    predictor, some = MeetingOfLayers(gates, 3, 2), MeetingOfLayers(gates, 3, 2)
    named = step(predictor, [x.clone() for x in inputs], Phase.PREFILL)
    assert named == step(some, [x[::8].clone() for x in inputs], Phase.PREFILL)
    assert sum(x.numel() for x in predictor._inputs) <= 2 * 512 * HIDDEN
    assert all(x.untyped_storage().nbytes() == 4 * x.numel() for x in predictor._inputs), "nothing larger is held"


def test_other_slots_begin_the_search_again():
    tuner = Heop(LAYERS, Setting(3, 2), Setting(6, 4), update_every=1, rounds=1)
    predictor = MeetingOfLayers([Gate(lambda x: x)] * LAYERS, 3, 2, tuner)
    for layer in range(LAYERS):
        tuner.record(layer, unused=1, missed=0, hits=0)
    tuner.end_step()
    assert tuner.settled
    predictor.slots_changed()
    tuner.record(0, unused=1, missed=0, hits=0)
    assert not any(group.fixed or group.costs for group in tuner._groups)
