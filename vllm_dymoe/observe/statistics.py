"""What a trace shows: functions from a trace to numbers, one for each idea."""

import itertools

import numpy as np
import torch

from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.residency.hotness import squared_gates


def load(trace: Trace) -> torch.Tensor:
    """How often each expert was chosen: float64 [layers, experts]."""
    return _summed(trace, torch.ones_like(trace.experts, dtype=torch.int64))


def gate_load(trace: Trace) -> torch.Tensor:
    """The sum of each expert's squared gates: float64 [layers, experts]; see :func:`~.hotness.squared_gates`."""
    return _summed(trace, squared_gates(trace.weights))


def _summed(trace: Trace, values: torch.Tensor) -> torch.Tensor:
    """Of int64 values [tokens, layers, top_k] for each expert: float64 [layers, experts]."""
    layers, experts = trace.header.num_layers, trace.header.num_experts
    index = trace.experts.long() + experts * torch.arange(layers)[:, None]
    sums = torch.zeros(layers * experts, dtype=torch.int64).index_add_(0, index.flatten(), values.flatten())
    return sums.view(layers, experts).double()


def popularity(trace: Trace) -> torch.Tensor:
    """The share of a layer's choices that each expert has (DuoServe-MoE Eq. 2): [layers, experts], rows sum to 1."""
    counts = load(trace)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def affinity(trace: Trace) -> torch.Tensor:
    """How likely an expert of the next layer is, given one of this (DuoServe-MoE Eq. 3).

    float64 [layers - 1, experts, experts], rows sum to 1; those of experts that were never chosen are 0.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    counts = torch.zeros(layers - 1, experts, experts, dtype=torch.float64)
    for layer in range(layers - 1):
        now, then = trace.experts[:, layer].long(), trace.experts[:, layer + 1].long()
        pairs = (now[:, :, None] * experts + then[:, None, :]).flatten()
        counts[layer] = pairs.bincount(minlength=experts * experts).view(experts, experts)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def _among(wanted: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
    """The share of wanted experts [tokens, layers, k] that are among the named [tokens, layers, n]: [layers]."""
    return (wanted[..., :, None] == named[..., None, :]).any(-1).double().mean((0, 2))


def reuse(trace: Trace) -> torch.Tensor:
    """The share of a token's experts that the token before it chose as well: [layers]; NaN without neighbours."""
    order = trace.in_order()
    neighbours = (trace.request[order].diff() == 0) & (trace.position[order].diff() == 1)
    return _among(trace.experts[order[1:][neighbours]], trace.experts[order[:-1][neighbours]])


def reuse_by_chance(trace: Trace) -> torch.Tensor:
    """What ``reuse`` were if tokens chose independently of each other by popularity: [layers]."""
    chosen = load(trace) / max(1, trace.num_tokens)  # the share of tokens that choose each expert
    return (chosen * chosen).sum(-1) / trace.header.top_k


def foreseen_by_affinity(trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of a layer's choice, each [layers - 1], that affinity and popularity name, as many as are chosen.

    Even requests are counted and odd ones are foreseen, if there are both.
    """
    odd = trace.request % 2 == 1
    known, asked = (trace.select(~odd), trace.select(odd)) if odd.any() and not odd.all() else (trace, trace)
    rows, top_k = affinity(known), trace.header.top_k
    wanted = asked.experts[:, 1:].long()
    by_rows = [counts[asked.experts[:, layer].long()].sum(1).topk(top_k).indices for layer, counts in enumerate(rows)]
    favourites = popularity(known)[1:].topk(top_k).indices
    named = torch.stack(by_rows, 1) if by_rows else wanted
    return _among(wanted, named), _among(wanted, favourites.expand_as(wanted))


def lru_hit_rates(trace: Trace) -> torch.Tensor:
    """The hit rate of an LRU cache for each layer, of each size: [layers, experts], the first for one expert.

    An LRU cache of n experts has an expert exactly if fewer than n others were used since its last use, so that one
    pass tells of every size (Mattson et al., 1970). Tokens are taken one at a time, request after request.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    uses = trace.experts[trace.in_order()].transpose(1, 2).reshape(-1, layers).numpy().astype(np.int64)
    last = np.full((layers, experts), -1, dtype=np.int64)
    rows, found = np.arange(layers), np.zeros((layers, experts))
    for now, used in enumerate(uses):
        before = last[rows, used]
        known = before >= 0
        found[rows[known], (last > before[:, None]).sum(1)[known]] += 1
        last[rows, used] = now
    return torch.from_numpy(found.cumsum(1) / max(1, len(uses)))


def activation_similarity(trace: Trace) -> torch.Tensor | None:
    """Cosine between the router inputs of neighbouring layers (DyMoE Figure 6): [layers - 1], None if not recorded."""
    if trace.router_inputs is None:
        return None
    layers = itertools.pairwise(trace.router_inputs.unbind(1))
    # Layer by layer: all of them in float32 would be twice the trace.
    means = [torch.cosine_similarity(one.float(), next_one.float(), dim=-1).double().mean() for one, next_one in layers]
    return torch.tensor(means, dtype=torch.float64)


def next_gate_accuracy(trace: Trace) -> torch.Tensor | None:
    """How much of the next layer's choice its gate makes of this layer's input (DyMoE Eq. 8): [layers - 1], or None."""
    return None if trace.next_gate is None else _among(trace.experts[:, 1:], trace.next_gate)
