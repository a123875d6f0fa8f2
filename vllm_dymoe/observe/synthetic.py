"""Made-up traces whose skew, locality and correlation are known, at the sizes of real models.

Every layer has experts of ranks 1 to M, and each choice of a token is one of three:

    with probability ``locality``       what the request's token before chose in this layer      (reuse)
    with probability ``correlation``    the expert that follows one that the token chose in the layer before
    otherwise                           drawn from P(rank) proportional to rank ** -skew         (popularity)

A choice that is taken already is drawn from P instead, so that a token's experts are different. Which expert follows
which is one permutation between any two layers that keeps ranks, so that P stays as it is. Domains have orders of rank
of their own, and share the permutations.
"""

import torch

from vllm_dymoe.observe.trace import Trace, TraceError, expert_dtype
from vllm_dymoe.residency.identity import ModelIdentity

QWEN3_30B_A3B = ModelIdentity("synthetic, of Qwen3-30B-A3B's size", "synthetic", 48, 128, 8, 2048)
_CERTAIN = 1e6  # above any logarithm of a probability with its noise


def synthetic_trace(
    header: ModelIdentity,
    *,
    requests: int = 32,
    prompt: int = 64,  # tokens of each prompt
    decode: int = 192,  # tokens of each answer
    skew: float = 0.5,  # exponent of the popularity; 0 makes all experts equally popular
    locality: float = 0.3,  # probability that a choice is one of the token's before
    correlation: float = 0.4,  # probability that it follows one of the layer's before; with locality at most 1
    domains: int = 1,  # requests belong to them in turn
    seed: int = 0,
) -> Trace:
    """Requests of equal length that are served together: all prompts first, then a token of each in every step."""
    if min(locality, correlation) < 0 or locality + correlation > 1:
        raise TraceError(f"locality {locality} and correlation {correlation} are no shares of the same choices.")
    random = torch.Generator().manual_seed(seed)
    domain, length = torch.arange(requests) % domains, prompt + decode
    chosen = _choices(header, domain, domains, length, skew, locality, correlation, random)
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
        domain=tuple(f"domain {number}" for number in domain.tolist()) if domains > 1 else None,
    )


def _choices(
    header: ModelIdentity, domain: torch.Tensor, domains: int, length: int, skew: float, locality: float,
    correlation: float, random: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """Experts of each token: int64 [position, requests, layers, top_k]."""
    layers, experts, top_k, requests = header.num_layers, header.num_experts, header.top_k, len(domain)
    following = [torch.randperm(experts, generator=random) for _ in range(layers - 1)]
    ranked = torch.stack([torch.randperm(experts, generator=random) for _ in range(domains)])  # [domains, rank]
    popularity = (-skew * torch.arange(1, experts + 1).log()).expand(domains, -1)
    preferred = []
    for layer in range(layers):
        preferred.append(torch.empty(domains, experts).scatter_(1, ranked, popularity)[domain])  # [requests, experts]
        if layer < layers - 1:
            ranked = following[layer][ranked]
    chosen = torch.empty(length, requests, layers, top_k, dtype=torch.long)
    for token in range(length):
        for layer in range(layers):
            kind = torch.rand(requests, top_k, generator=random)
            noise = -torch.empty(requests, experts).exponential_(generator=random).log()  # Gumbel's
            scores = preferred[layer] + noise
            if token > 0:
                scores.scatter_add_(1, chosen[token - 1, :, layer], (kind < locality) * _CERTAIN)
            if layer > 0:
                follows = (kind >= locality) & (kind < locality + correlation)
                scores.scatter_add_(1, following[layer - 1][chosen[token, :, layer - 1]], follows * _CERTAIN)
            chosen[token, :, layer] = scores.topk(top_k).indices
    return chosen
