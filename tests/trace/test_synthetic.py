"""Synthetic traces have the requested properties."""

import pytest
import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace import statistics
from vllm_dymoe.trace.synthetic import synthetic_trace

SMALL = ModelIdentity("small", "synthetic", num_layers=6, num_experts=64, top_k=4, hidden=8)


@pytest.mark.parametrize("locality", [0.0, 0.6])
def test_locality_is_as_asked(locality):
    trace = synthetic_trace(SMALL, requests=24, prompt=8, decode=56, skew=0, locality=locality)
    tokens = torch.stack([trace.experts[rows] for rows in trace.by_request()])  # [requests, tokens, layers, top_k]
    again = (tokens[:, 1:, ..., None] == tokens[:, :-1, :, None]).any(-1).float().mean().item()
    assert again == pytest.approx(locality + (1 - locality) * 4 / 64, abs=0.04)
    assert statistics.popularity(trace).max() * 64 < 2, "without skew no expert is much more popular"


def test_skew_is_as_asked_whatever_the_rest_is():
    loads = []
    for skew, locality in ((0, 0), (1, 0), (1, 0.4)):
        trace = synthetic_trace(SMALL, requests=24, prompt=0, decode=100, skew=skew, locality=locality)
        loads.append(statistics.popularity(trace).sort(-1, descending=True).values)
    flat, plain, mixed = loads
    assert plain[:, 0].min() > 3 * flat[:, 0].max()
    for rank in (0, 1, 10, 40):
        assert mixed[:, rank].mean().item() == pytest.approx(plain[:, rank].mean().item(), rel=0.35)


def test_the_seed_decides_everything():
    same, again, other = (synthetic_trace(SMALL, requests=2, prompt=1, decode=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(same.experts, again.experts)
    assert torch.equal(same.weights, again.weights)
    assert not torch.equal(same.experts, other.experts)


def test_every_token_has_different_experts_in_every_layer():
    few = ModelIdentity("few", "synthetic", num_layers=32, num_experts=8, top_k=2, hidden=8)
    trace = synthetic_trace(few, requests=2, prompt=1, decode=6, skew=2, locality=0.5)
    assert trace.experts.shape == (14, 32, 2)
    assert (trace.experts[..., 0] != trace.experts[..., 1]).all()
    assert (trace.weights.float().diff(dim=-1) <= 0).all()
    assert trace.weights.float().sum(-1).sub(1).abs().max() < 0.01
