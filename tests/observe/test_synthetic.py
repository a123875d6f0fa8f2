"""Made-up traces have what was asked for."""

import pytest
import torch

from vllm_dymoe.observe import statistics
from vllm_dymoe.observe.synthetic import synthetic_trace
from vllm_dymoe.observe.trace import TraceError
from vllm_dymoe.residency.identity import ModelIdentity

SMALL = ModelIdentity("small", "synthetic", num_layers=6, num_experts=64, top_k=4, hidden=8)


def measured(trace):
    """Shares of choices that the token before made too, and that follow from the layer before; loads by layer."""
    experts, followed = trace.experts.long(), []
    pairs = torch.zeros(SMALL.num_layers - 1, 64, 64)
    half = experts[trace.request % 2 == 0]  # what follows what is learned here, and tried on the others
    for layer in range(SMALL.num_layers - 1):
        index = half[:, layer, :, None] * 64 + half[:, layer + 1, None, :]
        pairs[layer] = torch.bincount(index.flatten(), minlength=64 * 64).view(64, 64)
    follow = pairs.argmax(-1)
    for rows in trace.by_request():
        own = experts[rows]
        if trace.request[rows[0]] % 2 == 0:
            continue
        expected = torch.stack([follow[layer][own[:, layer]] for layer in range(SMALL.num_layers - 1)], 1)
        followed.append((own[:, 1:, :, None] == expected[:, :, None, :]).any(-1).float().mean())
    return statistics.reuse(trace).mean().item(), torch.stack(followed).mean().item(), statistics.popularity(trace)


@pytest.mark.parametrize(("locality", "correlation"), [(0.0, 0.0), (0.6, 0.0), (0.0, 0.6), (0.4, 0.4)])
def test_locality_and_correlation_are_as_asked(locality, correlation):
    trace = synthetic_trace(SMALL, requests=24, prompt=8, decode=56, skew=0, locality=locality, correlation=correlation)
    reused, followed, load = measured(trace)
    chance = 4 / 64
    assert reused == pytest.approx(locality + (1 - locality) * chance, abs=0.04)
    assert followed == pytest.approx(correlation + (1 - correlation) * chance, abs=0.05)
    assert (load.max() * 64).item() < 2, "without skew no expert is much more popular"


def test_skew_is_as_asked_whatever_the_rest_is():
    loads = []
    for skew, rest in ((0, 0), (1, 0), (1, 0.4)):
        trace = synthetic_trace(SMALL, requests=24, prompt=0, decode=100, skew=skew, locality=rest, correlation=rest)
        loads.append(measured(trace)[2].sort(-1, descending=True).values)
    flat, plain, mixed = loads
    assert plain[:, 0].min() > 3 * flat[:, 0].max()
    for rank in (0, 1, 10, 40):
        assert mixed[:, rank].mean().item() == pytest.approx(plain[:, rank].mean().item(), rel=0.35)


def test_the_seed_decides_everything():
    same, again, other = (synthetic_trace(SMALL, requests=2, prompt=1, decode=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(same.experts, again.experts)
    assert torch.equal(same.weights, again.weights)
    assert not torch.equal(same.experts, other.experts)


@pytest.mark.parametrize(("locality", "correlation"), [(-0.1, 0), (0, -0.1), (0.6, 0.6)])
def test_probabilities_that_are_none_are_refused(locality, correlation):
    with pytest.raises(TraceError, match="no shares"):
        synthetic_trace(SMALL, locality=locality, correlation=correlation)


def test_every_token_has_different_experts_in_every_layer():
    few = ModelIdentity("few", "synthetic", num_layers=32, num_experts=8, top_k=2, hidden=8)
    trace = synthetic_trace(few, requests=2, prompt=1, decode=6, skew=2, locality=0.5, correlation=0.5)
    assert trace.experts.shape == (14, 32, 2)
    assert (trace.experts[..., 0] != trace.experts[..., 1]).all()
    assert (trace.weights.float().diff(dim=-1) <= 0).all()
    assert trace.weights.float().sum(-1).sub(1).abs().max() < 0.01
