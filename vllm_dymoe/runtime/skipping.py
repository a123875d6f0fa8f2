"""What becomes of the routing weights of experts that a step skips."""

from collections.abc import Iterable

import torch
from torch import Tensor


def absent_pairs(computed: Iterable[Tensor], expert_ids: Tensor) -> Tensor:
    """Pairs that nobody on this rank computes: of skipped experts and of other ranks'.

    Args:
        computed: int64 [n] each, rows ``token * top_k + k`` of the experts that are computed.
        expert_ids: [tokens, top_k].

    Returns:
        bool [tokens, top_k].
    """
    absent = torch.ones(expert_ids.numel(), dtype=torch.bool, device=expert_ids.device)
    rows = list(computed)
    if rows:
        absent.index_fill_(0, torch.cat(rows), False)
    return absent.view(expert_ids.shape)


def renormalized(weights: Tensor, absent: Tensor, expert_ids: Tensor) -> Tensor:
    """Routing weights of the experts that stay, scaled so that they sum to what they did with the skipped ones.

    Other ranks' experts are left out of it: each rank hands the weights of what it skips to what it computes. A token
    none of whose experts stays has nothing to scale.

    Args:
        weights: float32 [tokens, top_k].
        absent: bool [tokens, top_k], as :func:`absent_pairs` says.
        expert_ids: [tokens, top_k], negative where another rank has the expert.

    Returns:
        float32 [tokens, top_k]; absent pairs have whatever weight.
    """
    here = weights.masked_fill(expert_ids < 0, 0.0).sum(1, keepdim=True)
    stays = weights.masked_fill(absent, 0.0).sum(1, keepdim=True)
    return weights * torch.where(stays > 0, here / stays, 1.0)
