"""Tokens by expert: which rows each expert computes, and where its results go."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """One expert's share of a step.

    Attributes:
        tokens: int64 [n] rows of the layer's input.
        pairs: int64 [n] rows of the unweighted output, ``token * top_k + k``.
        size: n.
    """

    tokens: torch.Tensor
    pairs: torch.Tensor
    size: int


def group_by_expert(expert_ids: torch.Tensor) -> Mapping[int, Group]:
    """Group the (token, k) pairs of a step by expert.

    Args:
        expert_ids: [tokens, top_k] int; negative where another rank has the expert.

    Returns:
        Experts in ascending order, each with its rows in ascending order.
    """
    tokens, top_k = expert_ids.shape
    if tokens == 1:  # decode of one request: no sorting, no tensors to split
        places = _places(top_k, expert_ids.device)
        chosen = {expert: group for expert, group in zip(expert_ids[0].tolist(), places, strict=True) if expert >= 0}
        return {expert: chosen[expert] for expert in sorted(chosen)}
    order = expert_ids.flatten().sort(stable=True)
    # On the host, once: on a device each of the next three reads would wait for it.
    experts, counts = torch.unique_consecutive(order.values.cpu(), return_counts=True)
    sizes = counts.tolist()
    rows = torch.div(order.indices, top_k, rounding_mode="floor").split(sizes)
    groups = zip(experts.tolist(), rows, order.indices.split(sizes), sizes, strict=True)
    return {expert: Group(*group) for expert, *group in groups if expert >= 0}


@lru_cache
def _places(top_k: int, device: torch.device) -> list[Group]:
    """The groups of a single token, by k: the same in every step."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return [Group(token, pair, 1) for pair in torch.arange(top_k, device=device).split(1)]
