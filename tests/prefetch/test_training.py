from dataclasses import replace

import pytest
import torch

from tests.prefetch.made_up import SIZES, made_up, residual_stream
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture
from vllm_dymoe.prefetch.training import (
    FEWEST_REQUESTS,
    Recipe,
    TrainingError,
    _loss,
    hit_rates,
    split_by_request,
    train,
)

QUICK = Recipe(epochs=12, patience=3, batch=64, learning_rate=1e-2)
KINDS = {
    "a network for each layer": Architecture((64, 32), dropout=0.0),
    "one for all": Architecture((64, 32), history=2, shared=True, dropout=0.0),
    "linear": Architecture((), history=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_there_is_to_learn_and_more_than_counting_does(kind):
    trained = train(made_up(), KINDS[kind], QUICK)
    accuracy = {name: rates["accuracy"] for name, rates in trained.metrics.items()}
    # Of two of the three layers, nine in ten choices are predictable. In the third layer a quarter is right by chance.
    # Affinity does not see what the last layer depends on.
    assert accuracy["trained"] > 0.6
    assert accuracy["trained"] > accuracy["affinity"] + 0.1 > accuracy["popularity"] + 0.2
    assert trained.metrics["trained"]["at_least_one"] > 0.75
    assert trained.metrics["trained"]["all_k"] > 0.45


def test_only_answers_are_learnt_from():
    trace = made_up()
    prompts = replace(trace, prefill=trace.position < 30)
    assert train(prompts, KINDS["linear"], Recipe(epochs=1)).tokens == (18 * 10, 2 * 10)
    with pytest.raises(TrainingError, match="0 requests with answers"):
        train(replace(trace, prefill=torch.ones_like(trace.prefill)), KINDS["linear"])


def test_the_routers_input_is_used_where_it_is_seen():
    trace = made_up(noise=0.6, inputs=True)
    blind = train(trace, Architecture((16,), history=1), QUICK).metrics["trained"]["accuracy"]
    seeing = train(trace, Architecture((16,), history=1, router_input=True), QUICK).metrics["trained"]["accuracy"]
    assert seeing > blind + 0.1


def test_least_squares_name_more_than_the_next_gate_and_are_judged_by_what_is_run():
    trained = train(residual_stream(), ARCHITECTURES["linear+input"], Recipe(look_ahead=2))
    accuracy = {name: rates["accuracy"] for name, rates in trained.metrics.items()}
    assert accuracy["trained"] > accuracy["next gate"] + 0.05 > accuracy["popularity"]
    assert trained.network.look_ahead == 2
    assert trained.model is None


def test_no_request_is_on_both_sides():
    trace = made_up(requests=20)
    seen, held_out = split_by_request(trace, 0.25, seed=1)
    assert torch.equal(seen, ~held_out)
    apart = set(trace.request[held_out].tolist())
    assert len(apart) == 5
    assert not apart & set(trace.request[seen].tolist())
    assert apart != set(trace.request[split_by_request(trace, 0.25, seed=2)[1]].tolist())


def test_the_same_seed_gives_the_same_network_and_leaves_other_random_numbers_alone():
    trace, kind = made_up(requests=8, tokens=20), KINDS["one for all"]
    torch.manual_seed(5)
    first = train(trace, kind, Recipe(epochs=2, batch=32)).model.state_dict()
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    second = train(trace, kind, Recipe(epochs=2, batch=32)).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    third = train(trace, kind, Recipe(epochs=2, batch=32, seed=1)).model.state_dict()
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_it_stops_when_the_held_out_requests_are_foreseen_no_better():
    """From pure noise the network can only learn the training tokens by heart."""
    epochs = []
    trace = made_up(requests=10, tokens=20, noise=1.0)
    recipe = Recipe(epochs=60, patience=2, batch=32)
    trained = train(trace, KINDS["a network for each layer"], recipe, lambda *epoch: epochs.append(epoch))
    assert trained.epochs == len(epochs) < 60
    number, loss, held_out_loss = min(epochs, key=lambda epoch: epoch[2])
    assert number == trained.epochs - 2
    assert epochs[-1][1] < loss
    _, held_out = split_by_request(trace, recipe.held_out, recipe.seed)
    with torch.no_grad():
        kept = _loss(trained.model, trace.select(held_out)).item()
    assert kept == pytest.approx(held_out_loss, rel=1e-4), "what is kept is the best epoch's"


def test_hit_rates_of_a_table():
    scores = torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0], [3, 2, 1, 0], [0, 1, 2, 3]])
    experts = torch.tensor([[1, 0], [0, 3], [2, 3], [3, 2]])
    assert hit_rates(scores, experts) == {"all_k": 0.5, "at_least_one": 0.75, "accuracy": 0.625}


@pytest.mark.parametrize(
    ("trace", "architecture", "words"),
    [
        (made_up(requests=FEWEST_REQUESTS - 1), Architecture(()), "at least 8 are needed"),
        (made_up(requests=8, tokens=1), Architecture(()), "one token is left to train on"),
        (made_up(), Architecture((), router_input=True), "the trace has no router inputs"),
        (made_up(inputs=True), Architecture((), router_input=True), "the trace has no gates"),
        (made_up(sizes=replace(SIZES, num_layers=1)), Architecture(()), "has one MoE layer"),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(trace, architecture, words):
    with pytest.raises(TrainingError, match=words):
        train(trace, architecture, replace(QUICK, held_out=0.9))
