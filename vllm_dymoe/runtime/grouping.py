"""Tokens by expert: which rows each expert computes, and where its results go."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Group:
    """One expert's share of a step.

    Attributes:
        tokens: int64 [n] rows of the layer's input.
        pairs: int64 [n] rows of the unweighted output, ``token * top_k + k``.
    """

    tokens: torch.Tensor
    pairs: torch.Tensor


def group_by_expert(expert_ids: torch.Tensor) -> Mapping[int, Group]:
    """Group the (token, k) pairs of a step by expert.

    Args:
        expert_ids: [tokens, top_k] int; negative where another rank has the expert.

    Returns:
        Experts in ascending order, each with its rows in ascending order.
    """
    tokens, top_k = expert_ids.shape
    if tokens == 1:  # decode of one request: no sorting, no tensors to split
        row = torch.zeros(1, dtype=torch.int64, device=expert_ids.device)
        pairs = torch.arange(top_k, device=expert_ids.device)
        chosen = sorted((expert, k) for k, expert in enumerate(expert_ids[0].tolist()) if expert >= 0)
        return {expert: Group(row, pairs[k : k + 1]) for expert, k in chosen}
    order = expert_ids.flatten().sort(stable=True)
    experts, counts = torch.unique_consecutive(order.values, return_counts=True)
    sizes = counts.tolist()
    rows = torch.div(order.indices, top_k, rounding_mode="floor").split(sizes)
    groups = zip(experts.tolist(), rows, order.indices.split(sizes), strict=True)
    return {expert: Group(tokens, pairs) for expert, tokens, pairs in groups if expert >= 0}
