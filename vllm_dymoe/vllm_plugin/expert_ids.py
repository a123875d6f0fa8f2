"""A rank's numbers of the experts that a router chose among those of all ranks."""

import torch


def bounded_map(numbers: torch.Tensor) -> torch.Tensor:
    """Return a rank's numbers of experts, with those of other ids appended.

    :func:`own_ids` reads the result.

    Args:
        numbers: int [experts], this rank's numbers of all experts.
    """
    return torch.cat((numbers, numbers.new_tensor([len(numbers), -2, -1])))


def all_experts(numbers: torch.Tensor) -> int:
    """Return the number of experts of all ranks, given a :func:`bounded_map`."""
    return len(numbers) - 3


def own_ids(numbers: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Return this rank's numbers of experts in the shape of ids, int.

    Other ranks' experts and padding become -1. An invalid id stays invalid: it becomes -2 if it is below -1, and
    otherwise the number of all experts.

    Args:
        numbers: of a :func:`bounded_map`; None where the rank has all experts.
        ids: int [rows, top_k], as the router gives them; -1 for padding.
    """
    return ids if numbers is None else numbers[ids.clamp(-2, all_experts(numbers)).long()]
