"""Statistics of traces, one function each."""

import torch

from vllm_dymoe.trace.trace import Trace


def popularity(trace: Trace) -> torch.Tensor:
    """Return each expert's share of its layer's choices (DuoServe-MoE Eq. 2).

    The result is float64 [layers, experts]. Rows sum to 1, or to 0 for a layer without choices.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    index = (trace.experts.long() + experts * torch.arange(layers)[:, None]).flatten()
    counts = torch.bincount(index, minlength=layers * experts).view(layers, experts).double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def affinity(trace: Trace) -> torch.Tensor:
    """Return how probable each expert is after one of the layer before it.

    Entry [l, a, b] is the probability of expert b in layer l + 1, given expert a in layer l (DuoServe-MoE Eq. 3). The
    result is float64 [layers - 1, experts, experts]; rows sum to 1, or to 0 for experts that were never chosen.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    counts = torch.zeros(layers - 1, experts, experts, dtype=torch.float64)
    for layer in range(layers - 1):
        now, then = trace.experts[:, layer].long(), trace.experts[:, layer + 1].long()
        pairs = (now[:, :, None] * experts + then[:, None, :]).flatten()
        counts[layer] = pairs.bincount(minlength=experts * experts).view(experts, experts)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
