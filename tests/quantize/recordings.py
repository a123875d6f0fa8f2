"""Synthetic recorded inputs, for tests of code that reads them."""

import torch

from vllm_dymoe.quantize.recording import PartWriter, Recording


def correlated_inputs(tokens, columns, seed):
    """Return float32 inputs [tokens, columns] that resemble hidden states.

    Few directions carry most of the energy, and columns differ in size.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * (0.9 ** torch.arange(columns)).unsqueeze(1)
    sizes = torch.rand(columns, generator=generator) * 3 + 0.1
    return torch.randn(tokens, columns, generator=generator) @ mixing * sizes


def routing(tokens, num_experts, top_k, seed, rare=()):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator)
    scores[1:, list(rare)] = -1
    scores[0, list(rare)] = 2
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return weights / weights.sum(1, keepdim=True), scores.topk(top_k).indices.to(torch.int32)


def write_recording(folder, *, layers, num_experts, top_k, hidden, parts=(300, 200), rare=(), **described):
    """Write a complete recording; return it, its inputs and its routing.

    The routing of each layer is (weights, experts).
    """
    defaults = {"model": "0123", "texts": "4567", "dtype": "bfloat16", "activation": "silu"}
    recording = Recording(
        parts=tuple(parts),
        layers=tuple(layers),
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden,
        **(defaults | described),
    )
    folder.mkdir(exist_ok=True)
    recording.write(folder)
    total = sum(parts)
    inputs = [correlated_inputs(total, hidden, seed).bfloat16() for seed in range(len(layers))]
    routed = [routing(total, num_experts, top_k, 100 + seed, rare) for seed in range(len(layers))]
    begin = 0
    for number, tokens in enumerate(parts):
        writer = PartWriter(recording.part(folder, number), len(layers), hidden, top_k, torch.bfloat16, tokens)
        for layer in range(len(layers)):
            for rows in torch.arange(begin, begin + tokens).split(77):
                writer.add(layer, inputs[layer][rows], *(kind[rows] for kind in routed[layer]))
        writer.finish()
        begin += tokens
    return recording, inputs, routed
