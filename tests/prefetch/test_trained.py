"""The trained predictor; test_side_stream.py tests it on a side stream."""

import pytest
import torch

from tests.prefetch.made_up import SIZES, WIDE, made_up, residual_stream
from vllm_dymoe.planner.routing import Phase, PromptTokens, Routing
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.trained import TrainedPredictor
from vllm_dymoe.prefetch.training import Recipe, train

TRACE = made_up(inputs=True)
KINDS = {
    "linear": Architecture((), history=2),
    "short": Architecture((), history=1),
    "seeing": Architecture((16,), history=3, shared=True, router_input=True, dropout=0.0),
}
MODELS = {name: train(TRACE, kind, Recipe(epochs=3, batch=64)).model for name, kind in KINDS.items()}
WEIGHTS = torch.ones(1, SIZES.top_k)


def step(predictor, tokens, phase=Phase.DECODE, spoil=False, prompt=None):
    """Return the predictions for one step of these tokens.

    With ``spoil``, a layer's tensors are overwritten after its prediction.
    """
    answers = []
    for layer in range(SIZES.num_layers):
        ids = TRACE.experts[tokens, layer].int()
        x = TRACE.router_inputs[tokens, layer].bfloat16()
        predictor.observe(Routing(layer, 9, x, ids, WEIGHTS, phase, prompt))
        answers.append(predictor.predict(layer))
        if spoil:
            ids.fill_(0), x.fill_(torch.nan)
    return answers


def expected(model, layer, token):
    x = TRACE.router_inputs[token, layer - 1].bfloat16()[None]
    with torch.no_grad():
        return model(layer, TRACE.experts[token][None], x)[0].topk(SIZES.top_k)


@pytest.mark.parametrize("name", KINDS)
def test_it_names_what_the_network_says_for_each_layer_but_the_first(name):
    predictor = TrainedPredictor(fold(MODELS[name]), SIZES.top_k)
    for token in (3, 50, 51):
        answers = step(predictor, slice(token, token + 1), spoil=True)
        assert answers[-1] == []
        for layer, candidates in enumerate(answers[:-1], 1):
            want = expected(MODELS[name], layer, token)
            assert [candidate.layer for candidate in candidates] == [layer] * SIZES.top_k
            assert [candidate.expert for candidate in candidates] == want.indices.tolist()


def test_several_tokens_name_first_what_most_of_them_want():
    predictor = TrainedPredictor(fold(MODELS["linear"]), SIZES.top_k)
    for layer, candidates in enumerate(step(predictor, slice(0, 30))[:-1], 1):
        wanted = torch.cat([expected(MODELS["linear"], layer, token).indices for token in range(30)])
        counts = wanted.bincount(minlength=SIZES.num_experts)
        assert counts[[c.expert for c in candidates]].tolist() == sorted(counts[counts > 0].tolist(), reverse=True)


def test_rows_that_decode_beside_prompts_are_asked_about_and_the_popular_ones_follow():
    network = fold(MODELS["seeing"])
    predictor, alone, prompts = (TrainedPredictor(network, SIZES.top_k) for _ in range(3))
    rows = torch.tensor([True] * 4 + [False] + [True] * 3)
    told = PromptTokens(rows, rows, mixed=True)
    own = step(alone, slice(24, 25))
    favourites = step(prompts, slice(20, 28), Phase.PREFILL)
    step(predictor, slice(20, 28), Phase.PREFILL)
    for _ in range(2):  # the second step has other rows
        both = step(predictor, slice(20, 28), Phase.PREFILL, prompt=told)
        for named, decoded, popular in zip(both[:-1], own[:-1], favourites[:-1], strict=True):
            experts = [candidate.expert for candidate in named]
            assert named[: SIZES.top_k] == decoded
            assert len(set(experts)) == len(experts)
            assert {candidate.expert for candidate in popular} <= set(experts)
        rows, own = rows.flip(0), step(alone, slice(23, 24))
        told = PromptTokens(rows, rows, mixed=True)


def test_layers_further_ahead_are_named_behind_the_next_one_by_what_was_solved_for_them():
    trace = residual_stream()
    network = train(trace, ARCHITECTURES["linear+input"], Recipe(look_ahead=3)).network
    for layers in (1, 2, 3):
        predictor = TrainedPredictor(network.nearest(layers), WIDE.top_k)
        for layer in range(WIDE.num_layers):
            x, ids = trace.router_inputs[5:6, layer], trace.experts[5:6, layer].int()
            predictor.observe(Routing(layer, WIDE.num_layers, x.bfloat16(), ids, WEIGHTS))
            want = []
            for later in range(layer + 1, min(layer + 1 + layers, WIDE.num_layers)):
                scores = network.logits(later, ids.long(), x.bfloat16(), ahead=later - layer)
                want += [(later, expert) for expert in scores[0].topk(WIDE.top_k).indices.tolist()]
            assert predictor.predict(layer) == want


def test_a_step_knows_nothing_of_the_step_before():
    predictor = TrainedPredictor(fold(MODELS["seeing"]), SIZES.top_k)
    alone = step(TrainedPredictor(fold(MODELS["seeing"]), SIZES.top_k), slice(9, 10))
    step(predictor, slice(4, 5))
    ids, x = TRACE.experts[5:6, 0].int(), TRACE.router_inputs[5:6, 0]
    predictor.observe(Routing(0, 9, x, ids, WEIGHTS, Phase.DECODE))  # this step ends in its first layer
    assert step(predictor, slice(9, 10)) == alone


def test_a_prefill_gets_the_most_popular_and_no_network_is_asked():
    network = fold(MODELS["seeing"])
    network.logits = None
    predictor = TrainedPredictor(network, SIZES.top_k)
    for layer, candidates in enumerate(step(predictor, slice(0, 40), Phase.PREFILL)[:-1], 1):
        order = network.popularity[layer].argsort(descending=True).tolist()
        assert [candidate.expert for candidate in candidates] == order


def test_before_a_step_the_first_layers_most_popular_are_named():
    network = fold(MODELS["linear"])
    predictor = TrainedPredictor(network, SIZES.top_k)
    for _ in range(2):  # the second time after a decode step
        order = network.popularity[0].argsort(descending=True).tolist()
        assert [candidate.expert for candidate in predictor.predict(-1)] == order
        step(predictor, slice(9, 10))
