"""Synthetic traces with a predictable next layer, for predictors that learn."""

from dataclasses import replace
from functools import partial

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch import Gate
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, Architecture
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.training import Recipe, train
from vllm_dymoe.trace.gates import GateWeights
from vllm_dymoe.trace.trace import Trace

SIZES = ModelIdentity("a model", "0123456789abcdef", num_layers=4, num_experts=8, top_k=2, hidden=6)


def made_up(requests=20, tokens=40, sizes=SIZES, *, noise=0.1, inputs=False, seed=0):
    """Trace a model in which experts of one layer follow from those of another.

    Experts of layer 1 follow from those of layer 0 by a permutation, and those of layer 3 from those of layer 1, so a
    longer history helps. Layers 0 and 2 are random, and so is the fraction ``noise`` of the others. Router inputs
    contain the next layer's experts directly.
    """
    random = torch.Generator().manual_seed(seed)
    total = requests * tokens
    follows = [torch.randperm(sizes.num_experts, generator=random) for _ in range(sizes.num_layers)]
    experts = torch.empty(total, sizes.num_layers, sizes.top_k, dtype=torch.uint8)
    for layer in range(sizes.num_layers):
        drawn = torch.rand(total, sizes.num_experts, generator=random)
        if layer in (1, 3):
            source = experts[:, {1: 0, 3: 1}[layer]].long()
            certain = (torch.rand(total, sizes.top_k, generator=random) > noise).float()
            drawn.scatter_add_(1, follows[layer][source], 2 * certain)
        experts[:, layer] = drawn.topk(sizes.top_k).indices
    router_inputs = None
    if inputs:
        code = torch.randn(sizes.num_layers, sizes.num_experts, sizes.hidden, generator=random)
        following = experts.roll(-1, dims=1).long()
        router_inputs = torch.stack([code[i][following[:, i]].sum(1) for i in range(sizes.num_layers)], 1).half()
    return Trace(
        sizes,
        experts=experts,
        weights=torch.full(experts.shape, 0.5).half(),
        request=(torch.arange(total) // tokens).int(),
        position=(torch.arange(total) % tokens).int(),
        prefill=torch.zeros(total, dtype=torch.bool),
        router_inputs=router_inputs,
    )


WIDE = replace(SIZES, hidden=24)


def residual_stream(requests=20, tokens=60, sizes=WIDE, *, seed=0, moves=0.5):
    """Trace a model whose routers choose by the residual stream.

    Each expert adds its own vector to the stream. So the next gate is often right, and what it lacks follows from the
    chosen experts. ``moves`` is the fraction of the stream that a layer adds.
    """
    random = torch.Generator().manual_seed(seed)
    total, shape = requests * tokens, (sizes.num_layers, sizes.num_experts, sizes.hidden)
    weights = torch.randn(shape, generator=random).bfloat16()
    biases = 0.3 * torch.randn(shape[:2], generator=random)
    adds = torch.randn(shape, generator=random)
    x, inputs, experts = torch.randn(total, sizes.hidden, generator=random), [], []
    for layer in range(sizes.num_layers):
        inputs.append(x.half())
        experts.append(_best(inputs[-1], weights[layer], biases[layer], sizes.top_k))
        x = x + moves * (adds[layer][experts[-1].long()].sum(1) + 0.3 * torch.randn(x.shape, generator=random))
    following = [_best(inputs[n - 1], weights[n], biases[n], sizes.top_k) for n in range(1, sizes.num_layers)]
    return Trace(
        sizes,
        experts=torch.stack(experts, 1),
        weights=torch.full((total, sizes.num_layers, sizes.top_k), 0.5).half(),
        request=(torch.arange(total) // tokens).int(),
        position=(torch.arange(total) % tokens).int(),
        prefill=torch.zeros(total, dtype=torch.bool),
        router_inputs=torch.stack(inputs, 1),
        next_gate=torch.stack(following, 1),
        gates=GateWeights(weights, biases),
    )


def _best(x, weights, biases, top_k):
    return (x.float() @ weights.float().T + biases).topk(top_k).indices.byte()


def gates_of(trace):
    """Return the gates of such a model, as predictors use them."""
    weights = trace.gates

    def logits(layer, x):
        return x.float() @ weights.weights[layer].float().T + weights.biases[layer]

    return [Gate(partial(logits, layer)) for layer in range(trace.header.num_layers)]


def trained_on_made_up(sizes, folder, architecture="linear"):
    """Write the file of a predictor that was trained for one epoch."""
    kind = ARCHITECTURES[architecture] if architecture != "linear" else Architecture((), history=2)
    network = fold(train(made_up(sizes=sizes), kind, Recipe(epochs=1)).model)
    save_predictor(folder / "file.safetensors", PredictorCard(sizes, {"name": architecture}), network)
    return folder / "file.safetensors"
