"""From many tokens' choices to one order of experts."""

import torch


def rank_by_frequency(
    ids: torch.Tensor, scores: torch.Tensor, num_experts: int, keep: torch.Tensor | None = None
) -> list[tuple[int, float]]:
    """Experts by how many tokens chose them (DyMoE Eq. 7), those of the same number by their summed scores.

    Args:
        ids: [tokens, k] int64, the experts that each token chooses, best first.
        scores: float32 [tokens, k], each choice's score.
        num_experts: experts that there are.
        keep: bool [tokens, k], the choices that count; None for all.

    Returns:
        The chosen experts, best first, each with its number of tokens; of a single token each with its score.
    """
    if len(ids) == 1:
        single = list(zip(ids[0].tolist(), scores[0].tolist(), strict=True))
        return single if keep is None else [pair for pair, kept in zip(single, keep[0].tolist(), strict=True) if kept]
    ids, scores = (ids.flatten(), scores.flatten()) if keep is None else (ids[keep], scores[keep])
    counts = torch.bincount(ids, minlength=num_experts)
    mass = torch.zeros(num_experts, device=ids.device).index_add_(0, ids, scores)
    order = mass.argsort(descending=True)
    order = order[counts[order].argsort(descending=True, stable=True)]
    ranked = zip(order.tolist(), counts[order].tolist(), strict=True)
    return [(expert, float(count)) for expert, count in ranked if count > 0]
