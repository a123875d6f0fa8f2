"""Statistics of traces, one function each."""

import torch

from vllm_dymoe.trace.trace import Trace


def popularity(trace: Trace) -> torch.Tensor:
    """Return each expert's share of its layer's choices (DuoServe-MoE Eq. 2): float64 [layers, experts].

    Rows sum to 1, or to 0 for a layer without choices.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    index = (trace.experts.long() + experts * torch.arange(layers)[:, None]).flatten()
    counts = torch.bincount(index, minlength=layers * experts).view(layers, experts).double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def affinity(trace: Trace) -> torch.Tensor:
    """Return the probability of an expert of the next layer given one of this layer (DuoServe-MoE Eq. 3).

    float64 [layers - 1, experts, experts]; rows sum to 1, or to 0 for experts that were never chosen.
    """
    layers, experts = trace.header.num_layers, trace.header.num_experts
    counts = torch.zeros(layers - 1, experts, experts, dtype=torch.float64)
    for layer in range(layers - 1):
        now, then = trace.experts[:, layer].long(), trace.experts[:, layer + 1].long()
        pairs = (now[:, :, None] * experts + then[:, None, :]).flatten()
        counts[layer] = pairs.bincount(minlength=experts * experts).view(experts, experts)
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
