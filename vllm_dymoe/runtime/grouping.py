"""Tokens by expert: which rows each expert computes, and where its results go."""

from functools import lru_cache

import numpy as np
import torch

from vllm_dymoe.kernels import Group, Groups


def group_by_expert(expert_ids: torch.Tensor) -> Groups:
    """Group the (token, k) pairs of a step by expert, on the host: on a GPU this waits for the router.

    Args:
        expert_ids: [tokens, top_k] int; negative where another rank has the expert, or a row fills up a batch.

    Returns:
        Experts in ascending order, each with its rows in ascending order.
    """
    tokens, top_k = expert_ids.shape
    if tokens == 1:  # decode of one request: no sorting, no tensors to split
        ids = expert_ids[0].tolist()
        chosen = {expert: group for expert, group in zip(ids, _places(top_k), strict=True) if expert >= 0}
        if len(chosen) == top_k or len(chosen) == sum(expert >= 0 for expert in ids):  # no expert twice
            return {expert: chosen[expert] for expert in sorted(chosen)}
    keys = np.maximum(expert_ids.cpu().numpy().reshape(-1), -1).astype(np.int16)
    order = keys.argsort(kind="stable")  # of 16 bits it is a radix sort
    counts = np.bincount(keys + 1, minlength=1)
    pairs = torch.from_numpy(order[counts[0] :])
    experts = counts[1:].nonzero()[0]
    sizes = counts[1:][experts].tolist()
    rows = torch.div(pairs, top_k, rounding_mode="floor").split(sizes)
    groups = zip(experts.tolist(), rows, pairs.split(sizes), sizes, strict=True)
    return {expert: Group(*group) for expert, *group in groups}


@lru_cache
def _places(top_k: int) -> list[Group]:
    """The groups of a single token, by k: the same in every step."""
    token = torch.zeros(1, dtype=torch.int64)
    return [Group(token, pair, 1) for pair in torch.arange(top_k).split(1)]
