"""What a trace shows: functions from a trace to numbers, one for each idea."""

import torch

from vllm_dymoe.trace.trace import Trace


def popularity(trace: Trace) -> torch.Tensor:
    """The share of a layer's choices that each expert has (DuoServe-MoE Eq. 2): float64 [layers, experts], rows sum to
    1; 0 in a layer that chose nothing."""
    layers, experts = trace.header.num_layers, trace.header.num_experts
    index = (trace.experts.long() + experts * torch.arange(layers)[:, None]).flatten()
    counts = torch.bincount(index, minlength=layers * experts).view(layers, experts).double()
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
