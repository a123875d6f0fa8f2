"""Routing weights that skipped experts hand on, or that multiply experts' inputs.

Both have the same bits wherever they are computed.
"""

import torch
from torch import Tensor


def renormalized(weights: Tensor, absent: Tensor, elsewhere: Tensor) -> Tensor:
    """Return weights scaled so that each token's sum stays: float32 [tokens, top_k].

    Weights of absent pairs are unused.

    Args:
        weights: float32 [tokens, top_k].
        absent: bool [tokens, top_k], pairs that are not computed here.
        elsewhere: bool [tokens, top_k], those among them whose expert another rank has, which keep their weights.
    """
    both = torch.stack((weights.masked_fill(elsewhere, 0.0), weights.masked_fill(absent, 0.0)))
    here, stays = sum_in_order(both.unbind(2))
    return weights * torch.where(stays > 0, here / stays, 1.0).unsqueeze(1)


def weighted_inputs(x: Tensor, weights: Tensor) -> Tensor:
    """Return the experts' inputs multiplied with routing weights.

    There is a row for each pair: [tokens * top_k, hidden] in the dtype of x. Each product is rounded once.

    Args:
        x: [tokens, hidden] bfloat16 or float16.
        weights: float32 [tokens, top_k], rounded to the dtype of x before.
    """
    return (x.unsqueeze(1) * weights.unsqueeze(2).to(x.dtype)).flatten(0, 1)


def sum_in_order(parts: tuple[Tensor, ...]) -> Tensor:
    """Add parts in order; the first part is overwritten.

    The sum starts from zero so that it is never -0.0.
    """
    total, *rest = parts
    total.add_(0.0)
    for part in rest:
        total.add_(part)
    return total
