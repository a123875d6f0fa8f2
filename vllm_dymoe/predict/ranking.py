"""From many tokens' choices to one order of experts."""

import torch


def rank_by_frequency(ids: torch.Tensor, scores: torch.Tensor) -> list[tuple[int, float]]:
    """Experts by how many tokens chose them (DyMoE Eq. 7), those of the same number by their summed scores.

    Args:
        ids: int64 [choices], an expert for each choice of each token.
        scores: float32 [choices].

    Returns:
        The chosen experts, best first, each with its number of tokens.
    """
    counts = torch.bincount(ids)
    mass = torch.zeros(len(counts), dtype=torch.float32, device=ids.device).index_add_(0, ids, scores)
    order = mass.argsort(descending=True)
    order = order[counts[order].argsort(descending=True, stable=True)]
    ranked = zip(order.tolist(), counts[order].tolist(), strict=True)
    return [(expert, float(count)) for expert, count in ranked if count > 0]
