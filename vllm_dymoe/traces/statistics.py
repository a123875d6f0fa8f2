"""What a trace shows: functions from a trace to numbers, one for each idea."""

from collections.abc import Iterator

import numpy as np
import torch

from vllm_dymoe.traces.trace import Trace


def load(trace: Trace) -> torch.Tensor:
    """How often each expert was chosen: float64 [layers, experts]."""
    layers, experts = trace.header.num_layers, trace.header.num_experts
    index = trace.experts.long() + experts * torch.arange(layers)[:, None]
    return index.flatten().bincount(minlength=layers * experts).view(layers, experts).double()


def popularity(trace: Trace) -> torch.Tensor:
    """The share of a layer's choices that each expert has (DuoServe-MoE Eq. 2): [layers, experts], rows sum to 1.

    P_l(i) = sum_n 1(e_i in E_l,n) / sum_m sum_n 1(e_m in E_l,n)
    """
    counts = load(trace)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def affinity(trace: Trace) -> torch.Tensor:
    """How likely an expert of the next layer is, given one of this (DuoServe-MoE Eq. 3).

    A_l,l+1(i, j) = sum_n 1(e_i in E_l,n and e_j in E_l+1,n) / sum_m sum_n 1(e_i in E_l,n and e_m in E_l+1,n)

    Returns:
        float64 [layers - 1, experts, experts], rows sum to 1; those of experts that were never chosen are 0.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    counts = torch.zeros(layers - 1, experts, experts, dtype=torch.float64)
    for layer in range(layers - 1):
        now, then = trace.experts[:, layer].long(), trace.experts[:, layer + 1].long()
        pairs = (now[:, :, None] * experts + then[:, None, :]).flatten()
        counts[layer] = pairs.bincount(minlength=experts * experts).view(experts, experts)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def cumulative_share(trace: Trace) -> torch.Tensor:
    """The share of choices that the n most popular experts of each layer have: [layers, experts], ending with 1."""
    return popularity(trace).sort(-1, descending=True).values.cumsum(-1)


def by_domain(trace: Trace) -> dict[str, Trace]:
    """The tokens of each domain; of requests without one under an empty name."""
    if trace.domain is None:
        return {}
    number = {name: place for place, name in enumerate(sorted(set(trace.domain)))}
    domain = torch.tensor([number[name] for name in trace.domain])[trace.request.long()]
    found = {name: trace.select(domain == place) for name, place in number.items()}
    return {name: part for name, part in found.items() if part.num_tokens}


def overlap(one: Trace, other: Trace) -> torch.Tensor:
    """How many of the n hottest experts of a layer two traces share, over n (DynaExq Figure 2): [layers, experts]."""
    ranks = [load(trace).argsort(dim=-1, descending=True, stable=True).argsort(-1) for trace in (one, other)]
    later = torch.maximum(*ranks)  # an expert is among the n hottest of both from here on
    shared = torch.zeros(later.shape, dtype=torch.float64).scatter_add_(1, later, torch.ones(later.shape).double())
    return shared.cumsum(-1) / torch.arange(1, later.shape[1] + 1)


def heavy_load(trace: Trace) -> torch.Tensor | None:
    """Heavy hitters of prompts that each expert was chosen for (DyMoE Eq. 2): int64 [layers, experts].

    Returns:
        None if they were not recorded.
    """
    if trace.heavy is None:
        return None
    chosen = zip(trace.experts.unbind(1), trace.heavy.unbind(1), strict=True)
    experts = trace.header.num_experts
    return torch.stack([ids[heavy].long().flatten().bincount(minlength=experts) for ids, heavy in chosen])


def _neighbours(trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those right before them, where both were recorded."""
    order = trace.in_order()
    request, position = trace.request[order], trace.position[order]
    next_to_each_other = (request[1:] == request[:-1]) & (position[1:] == position[:-1] + 1)
    return order[1:][next_to_each_other], order[:-1][next_to_each_other]


def reuse(trace: Trace) -> torch.Tensor:
    """The share of a token's experts that the token before it chose as well: [layers]; NaN without neighbours."""
    now, before = _neighbours(trace)
    same = trace.experts[now][:, :, :, None] == trace.experts[before][:, :, None, :]
    return same.any(-1).double().mean((0, 2))


def reuse_by_chance(trace: Trace) -> torch.Tensor:
    """What ``reuse`` were if tokens chose independently of each other by popularity: [layers]."""
    chosen = load(trace) / max(1, trace.num_tokens)  # the share of tokens that choose each expert
    return (chosen * chosen).sum(-1) / trace.header.top_k


def foreseen_by_affinity(trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of a layer's choice is among what affinity names, and what popularity names: each [layers - 1].

    As many experts are named as are chosen. Even requests are counted and odd ones are foreseen, if there are both.
    """
    odd = trace.request % 2 == 1
    known, asked = (trace.select(~odd), trace.select(odd)) if odd.any() and not odd.all() else (trace, trace)
    rows, favourites = affinity(known), popularity(known)
    top_k = trace.header.top_k
    by_rows, by_popularity = [], []
    for layer in range(trace.header.num_layers - 1):
        wanted = asked.experts[:, layer + 1].long()
        named = rows[layer][asked.experts[:, layer].long()].sum(1).topk(top_k).indices
        by_rows.append(_found(wanted, named))
        by_popularity.append(_found(wanted, favourites[layer + 1].topk(top_k).indices.expand_as(wanted)))
    return torch.tensor(by_rows, dtype=torch.float64), torch.tensor(by_popularity, dtype=torch.float64)


def _found(wanted: torch.Tensor, named: torch.Tensor) -> float:
    """The share of wanted experts [tokens, k] that are named [tokens, n]."""
    return (wanted[:, :, None] == named[:, None, :]).any(-1).double().mean().item()


def stack_distances(trace: Trace) -> torch.Tensor:
    """How many other experts a layer used since it used the same one: int64 [uses, layers]; -1 at the first use.

    An LRU cache of n experts has an expert exactly if its distance is below n, so that one pass tells of every size
    (Mattson et al., 1970). Tokens are taken one at a time, request after request, and a token's experts in order.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    uses = trace.experts[trace.in_order()].transpose(1, 2).reshape(-1, layers).numpy().astype(np.int64)
    last = np.full((layers, experts), -1, dtype=np.int64)
    rows = np.arange(layers)
    distances = np.empty((len(uses), layers), dtype=np.int64)
    for now, used in enumerate(uses):
        before = last[rows, used]
        distances[now] = np.where(before < 0, -1, (last > before[:, None]).sum(1))
        last[rows, used] = now
    return torch.from_numpy(distances)


def lru_hit_rates(trace: Trace) -> torch.Tensor:
    """The hit rate of an LRU cache for each layer, of each size: [layers, experts], the first for one expert."""
    layers, experts = trace.header.num_layers, trace.header.num_experts
    distances = stack_distances(trace)
    rates = torch.zeros(layers, experts, dtype=torch.float64)
    for layer in range(layers):
        known = distances[:, layer][distances[:, layer] >= 0]
        rates[layer] = known.bincount(minlength=experts).cumsum(0)
    return rates / max(1, len(distances))


def activation_similarity(trace: Trace) -> torch.Tensor | None:
    """Cosine between what the routers of neighbouring layers are given (DyMoE Figure 6): [layers - 1], or None."""
    if trace.router_inputs is None:
        return None
    means = []
    for now, then in _layer_pairs(trace.router_inputs):
        means.append(torch.cosine_similarity(now.float(), then.float(), dim=-1).double().mean())
    return torch.stack(means) if means else torch.empty(0, dtype=torch.float64)


def _layer_pairs(inputs: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for layer in range(inputs.shape[1] - 1):
        yield inputs[:, layer], inputs[:, layer + 1]


def next_gate_accuracy(trace: Trace) -> torch.Tensor | None:
    """How much of the next layer's choice its gate makes of this layer's input (DyMoE Eq. 8): [layers - 1], or None."""
    if trace.next_gate is None:
        return None
    same = trace.next_gate[:, :, None, :] == trace.experts[:, 1:, :, None]
    return same.any(-1).double().mean((0, 2))
