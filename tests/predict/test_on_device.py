"""Predictors as tensor operations name what they name on the host, of rows that only fill up a batch anything."""

import pytest
import torch

from tests.predict.gates import random_gates, random_inputs
from vllm_dymoe.predict import TrainedPredictor
from vllm_dymoe.predict.folded import FoldedMLP
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.residency.routing import Phase, Routing

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 16
CPU = torch.device("cpu")


def random_network(history):
    generator = torch.Generator().manual_seed(history)
    sizes = (3, history * EXPERTS, 12), (3, HIDDEN, 12), (3, 12, EXPERTS), (3, EXPERTS), (LAYERS, EXPERTS)
    names = "tables", "gates", "matrix.0", "bias.0", "popularity"
    return FoldedMLP({name: torch.randn(size, generator=generator) for name, size in zip(names, sizes, strict=True)})


def predictors():
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    one_rank, _ = random_gates(LAYERS, EXPERTS, HIDDEN, local=[0, -1, 1, -1, 2, -1, 3, -1])
    return {
        "gates": NextGate(gates, TOP_K),
        "more of each": NextGate(gates, 5),
        "one rank": NextGate(one_rank, TOP_K),
        "network": TrainedPredictor(random_network(2), TOP_K),
        "network of one layer": TrainedPredictor(random_network(1), 3),
    }


@pytest.mark.parametrize("name", predictors())
def test_the_same_experts_as_on_the_host(name):
    """One token at a time, in two steps; a second row is no token, and has neither experts nor an input."""
    for seed in range(2):
        host, device = predictors()[name], predictors()[name].on_device(CPU)
        inputs = random_inputs(LAYERS, 1, HIDDEN, seed)
        ids = torch.randint(0, EXPERTS, (LAYERS, 1, TOP_K), generator=torch.Generator().manual_seed(seed))
        for layer in range(LAYERS - 1):
            host.observe(Routing(layer, LAYERS, inputs[layer], ids[layer], torch.ones(1, TOP_K), Phase.DECODE))
            named = [candidate.expert for candidate in host.predict(layer)]
            x = torch.cat((inputs[layer], torch.full((1, HIDDEN), torch.nan)))
            experts, scores = device.foresee(layer, x, torch.cat((ids[layer], torch.full((1, TOP_K), -1))))
            assert experts.shape == scores.shape == (2, device.guesses)
            assert [expert for expert in experts[0].tolist() if expert >= 0] == named
            assert scores.dtype == torch.float32
            assert ((scores[0] >= 0) & (scores[0] <= 1)).all()
            assert scores[0].tolist() == sorted(scores[0].tolist(), reverse=True)


def test_what_needs_the_host_has_no_such_form():
    assert Popularity(LAYERS, EXPERTS, TOP_K).on_device(CPU) is None
