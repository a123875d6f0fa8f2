"""Least squares from sums: for few tokens, for many, and for tokens with NaN."""

from dataclasses import replace

import pytest
import torch

from tests.prefetch.made_up import WIDE, gates_of, residual_stream
from vllm_dymoe.prefetch.expert_mlp import chosen
from vllm_dymoe.prefetch.gate import weights_of
from vllm_dymoe.prefetch.linear import PRIOR_TOKENS, LeastSquares, ask_next_gates, hits, make_network, train_on
from vllm_dymoe.trace.gates import GateWeights

CPU = torch.device("cpu")
TRACE = residual_stream(requests=40)
UNSEEN = residual_stream(requests=60).select(slice(40 * 60, None))
SHARES = torch.zeros(WIDE.num_layers, WIDE.num_experts)


def trained(tokens, look_ahead=2, trace=TRACE):
    x, experts = trace.router_inputs[:tokens], trace.experts[:tokens]
    return train_on(trace.gates, WIDE, experts, x, SHARES, look_ahead, block=37)


def accuracy(network, ahead=1):
    """Return the share of chosen experts that it predicts for unseen tokens."""
    ids, x, right = UNSEEN.experts.long(), UNSEEN.router_inputs, []
    for later in range(ahead, WIDE.num_layers):
        scores = network.logits(later, ids[:, later - ahead], x[:, later - ahead], ahead)
        right.append(hits(scores, ids[:, later])[0].float().mean())
    return sum(right).item() / len(right) / WIDE.top_k


def next_gate(look_ahead=2):
    network = make_network(WIDE, look_ahead, CPU, torch.float32)
    ask_next_gates(network, TRACE.gates, WIDE.top_k)
    return network


def test_without_tokens_it_is_the_next_gate():
    network, gates = next_gate(), TRACE.gates
    for ahead in (1, 2):
        for later in range(ahead, WIDE.num_layers):
            x = TRACE.router_inputs[:5, later - ahead].float()
            ids = TRACE.experts[:5, later - ahead].long()
            want = x @ gates.weights[later].float().T + gates.biases[later]
            assert torch.allclose(network.logits(later, ids, x, ahead), want, atol=1e-4)


@pytest.mark.parametrize("ahead", [1, 2])
def test_few_tokens_lose_hardly_anything_and_many_win(ahead):
    gate = accuracy(next_gate(), ahead)
    assert accuracy(trained(20), ahead) > gate - 0.02
    assert accuracy(trained(2400), ahead) > gate + 0.05


def test_the_sums_are_those_of_the_ridge_regression():
    """Compare with a direct solution in float64, from layer 1 to layer 3."""
    x, ids = TRACE.router_inputs.double(), TRACE.experts.long()
    features = torch.cat([chosen(ids[:, 1], WIDE.num_experts).double(), x[:, 1]], 1)
    weights = TRACE.gates.weights[3].double()
    gram = features.T @ features
    gram.diagonal().add_(PRIOR_TOKENS / len(x) * gram.diagonal().mean())
    change = torch.linalg.solve(gram, features.T @ ((x[:, 3] - x[:, 1]) @ weights.T))
    want = features @ change + x[:, 1] @ weights.T + TRACE.gates.biases[3]
    got = trained(len(x)).logits(3, ids[:, 1], TRACE.router_inputs[:, 1].float(), ahead=2)
    assert torch.allclose(got.double(), want, atol=2e-3), "float32 sums of 2400 tokens"


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 3e4])
def test_a_token_that_is_no_usable_number_adds_nothing(spoiled):
    gates, x, ids = TRACE.gates, TRACE.router_inputs.transpose(0, 1), TRACE.experts.transpose(0, 1).int()
    sums = [LeastSquares(WIDE, range(3), 1, CPU) for _ in range(2)]
    sums[0].add(gates, x[:, :50], ids[:, :50])
    sums[0].tokens += 1
    broken = torch.cat([x[:, :50], x[:, 50:51]], 1)
    broken[2, 50, 3] = spoiled
    sums[1].add(gates, broken, torch.cat([ids[:, :50], torch.full_like(ids[:, :1], -1)], 1))
    networks = [next_gate(1) for _ in sums]
    for one, network in zip(sums, networks, strict=True):
        for layer in range(3):
            one.solve(layer, gates, network)
    # One more row of zeros may change the order of a product's sum.
    assert torch.allclose(networks[0].tables, networks[1].tables, atol=1e-5)
    assert torch.allclose(networks[0].gates, networks[1].gates, atol=1e-5)


def test_routers_that_correct_their_scores_are_ranked_by_corrected_scores():
    gates = GateWeights(TRACE.gates.weights, TRACE.gates.biases, 3 * torch.rand(4, 8), "sigmoid")
    network = train_on(gates, WIDE, TRACE.experts, TRACE.router_inputs, SHARES, 1)
    plain = trained(len(TRACE.experts), 1)
    ids, x = TRACE.experts[:9, 0].long(), TRACE.router_inputs[:9, 0]
    want = plain.logits(1, ids, x).sigmoid() + gates.correction[1]
    assert torch.allclose(network.logits(1, ids, x), want, atol=1e-5)


def test_gates_become_numbers_by_being_asked():
    found = weights_of(gates_of(TRACE), WIDE.hidden, CPU)
    assert torch.allclose(found.weights.float(), TRACE.gates.weights.float(), atol=1e-6)
    assert torch.allclose(found.biases, TRACE.gates.biases)
    assert found.correction is None
    corrected = [replace(gate, correction=torch.arange(8)) for gate in gates_of(TRACE)]
    assert weights_of(corrected, WIDE.hidden, CPU).correction[2].tolist() == list(range(8))
