"""The paper's network and its states, before and after folding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.prefetch.made_up import SIZES, made_up
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture, ExpertMLP, States
from vllm_dymoe.prefetch.folded import FoldedMLP, fold
from vllm_dymoe.trace.statistics import affinity, popularity

TRACE = made_up(inputs=True)
POPULARITY, AFFINITY = popularity(TRACE).float(), affinity(TRACE).float()


def make_model(architecture):
    """Return a network with normalisation and trained weights."""
    torch.manual_seed(0)
    model = ExpertMLP(States(SIZES, architecture, POPULARITY, AFFINITY))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor, std=0.5)
            nn.init.uniform_(module.running_var, 0.2, 3)
    return model.eval()


def small(architecture):
    return replace(architecture, widths=tuple(max(4, width // 64) for width in architecture.widths))


def test_a_state_is_history_popularity_and_affinity():
    states = States(SIZES, Architecture(), POPULARITY, AFFINITY)
    experts = torch.tensor([[[1, 2], [3, 4], [5, 6], [0, 1]]], dtype=torch.uint8)
    state = states(2, experts)[0]
    assert state.shape == (3 * 8 + 8 + 8,)
    past, popular, related = state.split([24, 8, 8])
    assert past.nonzero().flatten().tolist() == [3, 4, 8 + 1, 8 + 2]  # layer 1 comes first; layer 3 has not run yet
    assert torch.equal(popular, POPULARITY[2])
    assert torch.allclose(related, (AFFINITY[1, 3] + AFFINITY[1, 4]) / 2)


def test_a_network_sees_inputs_if_it_shall():
    states = States(SIZES, Architecture((), history=1, router_input=True), POPULARITY, AFFINITY)
    x = torch.randn(3, SIZES.hidden).half()
    assert torch.equal(states(3, TRACE.experts[:3], x)[:, 24:], x.float())


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_folding_changes_nothing(name):
    architecture = small(ARCHITECTURES[name])
    model = make_model(architecture)
    folded = FoldedMLP(fold(model).tensors)
    rows = None
    for layer in range(1, SIZES.num_layers):
        experts, x = TRACE.experts[:50], TRACE.router_inputs[:50, layer - 1]
        rows = folded.remember(experts[:, layer - 1].int(), rows)
        got = folded.logits(layer, rows, x if architecture.router_input else None)
        one = folded.logits(layer, rows[:1], x[:1] if architecture.router_input else None)
        torch.testing.assert_close(one, got[:1])
        # float32, summed in another order.
        torch.testing.assert_close(got, model(layer, experts, x), atol=2e-4, rtol=1e-4)


def test_a_linear_network_begins_with_affinity():
    model = ExpertMLP(States(SIZES, Architecture((), history=2), POPULARITY, AFFINITY))
    for layer in range(1, SIZES.num_layers):
        rows = AFFINITY[layer - 1][TRACE.experts[:, layer - 1].long()].mean(1)
        assert torch.equal(model(layer, TRACE.experts).argsort(stable=True), rows.argsort(stable=True))


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "weights"), [(32, 8, 2, 3.3e6), (48, 128, 8, 15.7e6)], ids=["Mixtral", "Qwen3-30B"]
)
def test_the_shared_network_has_the_papers_size_and_stays_so_when_folded(layers, experts, top_k, weights):
    sizes = replace(SIZES, num_layers=layers, num_experts=experts, top_k=top_k)
    states = States(
        sizes, ARCHITECTURES["paper-shared"], torch.rand(layers, experts), torch.zeros(layers - 1, experts, experts)
    )
    model = ExpertMLP(states)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(weights, rel=0.02)
    # One table for all layers, and a small one for each; the paper's predictor takes about 300 MB.
    assert fold(model.eval()).nbytes < 4 * weights + 4 * layers * experts * 2100 < 300e6
