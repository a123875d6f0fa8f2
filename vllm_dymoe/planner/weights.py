"""Routing weights of a token whose skipped experts hand theirs on to its others; the same bits wherever it is done."""

import torch
from torch import Tensor


def renormalized(weights: Tensor, absent: Tensor, elsewhere: Tensor) -> Tensor:
    """Return weights [tokens, top_k], scaled so that a token's sum stays what it was; those of absent pairs are unused.

    Args:
        weights: float32 [tokens, top_k].
        absent: bool [tokens, top_k], pairs that are not computed here.
        elsewhere: bool [tokens, top_k], those among them whose expert another rank has, which keep their weights.
    """
    both = torch.stack((weights.masked_fill(elsewhere, 0.0), weights.masked_fill(absent, 0.0)))
    here, stays = sum_in_order(both.unbind(2))
    return weights * torch.where(stays > 0, here / stays, 1.0).unsqueeze(1)


def sum_in_order(parts: tuple[Tensor, ...]) -> Tensor:
    """Add parts in order, starting from zero so that the sum is never -0.0; the first part is overwritten."""
    total, *rest = parts
    total.add_(0.0)
    for part in rest:
        total.add_(part)
    return total
