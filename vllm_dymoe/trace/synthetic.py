"""Synthetic traces with known skew and locality, at the sizes of real models.

Every layer orders its experts by popularity in its own way, ranks 1 to M, and each choice of a token is one of two:

    with probability ``locality``       what the request's previous token chose in this layer    (reuse)
    otherwise                           drawn from P(rank) proportional to rank ** -skew         (popularity)

A choice that is taken already is drawn from P instead, so that a token's experts are distinct.
"""

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.trace import Trace, expert_dtype

_CERTAIN = 1e6  # above any logarithm of a probability plus noise


def synthetic_trace(
    header: ModelIdentity,
    *,
    requests: int = 32,
    prompt: int = 64,  # tokens of each prompt
    decode: int = 192,  # tokens of each answer
    skew: float = 0.5,  # exponent of the popularity; 0 makes all experts equally popular
    locality: float = 0.3,  # probability that a choice repeats one of the previous token
    seed: int = 0,
) -> Trace:
    """Return a trace of requests of equal length that are served together.

    All prompts come first, then one token of each request per step.
    """
    random, length = torch.Generator().manual_seed(seed), prompt + decode
    chosen = _choices(header, requests, length, skew, locality, random)
    # From [position, request] to the order of the steps: prompts one after the other, then decode in turn.
    position, request = (grid.flatten() for grid in torch.meshgrid(
        torch.arange(length), torch.arange(requests), indexing="ij"))  # fmt: skip
    decoded_at = prompt * requests + position * requests + request
    order = torch.where(position < prompt, request * prompt + position, decoded_at).argsort()
    weights = torch.empty(length, requests, header.num_layers, header.top_k).exponential_(generator=random)
    weights = (weights / weights.sum(-1, keepdim=True)).sort(-1, descending=True).values
    return Trace(
        header,
        experts=chosen.flatten(0, 1)[order].to(expert_dtype(header.num_experts)),
        weights=weights.flatten(0, 1)[order].half(),
        request=request[order].int(),
        position=position[order].int(),
        prefill=position[order] < prompt,
    )


def _choices(
    header: ModelIdentity, requests: int, length: int, skew: float, locality: float, random: torch.Generator
) -> torch.Tensor:
    """Return the experts of each token: int64 [position, requests, layers, top_k]."""
    layers, experts, top_k = header.num_layers, header.num_experts, header.top_k
    popularity = -skew * torch.arange(1, experts + 1).log()
    preferred = torch.stack([popularity[torch.randperm(experts, generator=random)] for _ in range(layers)])
    chosen = torch.empty(length, requests, layers, top_k, dtype=torch.long)
    for token in range(length):
        noise = -torch.empty(requests, layers, experts).exponential_(generator=random).log()  # Gumbel noise
        scores = preferred + noise
        if token > 0:
            again = torch.rand(requests, layers, top_k, generator=random) < locality
            scores.scatter_add_(2, chosen[token - 1], again * _CERTAIN)
        chosen[token] = scores.topk(top_k).indices
    return chosen
