"""Work lists made on the device: no host decision, no synchronisation, so that a graph can replay them."""

import torch
from torch import Tensor

from vllm_dymoe.kernels.triton.launch import WorkList
from vllm_dymoe.residency.checks import check_tensor


def schedule(expert_ids: Tensor, num_experts: int, step: int) -> WorkList:
    """Group (token, k) pairs by expert, in ascending order within each, and cut each group into items.

    How many items there are is known on the device only: the list has room for the most there can be, and the rest of
    it is empty items, which launches pass over. Pairs without an expert come last, and in no item.

    Args:
        expert_ids: [tokens, top_k] int, rows of the expert table; negative where a pair is not computed.
        num_experts: rows of the table.
        step: positions of an item, 2 for decode and block_m of the tile for grouped launches.

    Raises:
        TypeError: ids that are no integers.
        ValueError: another shape, or no positions in an item.
    """
    check_tensor("expert_ids", expert_ids, shape=(None, None))
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_ids is {expert_ids.dtype}, expected torch.int32 or torch.int64")
    if step < 1:
        raise ValueError(f"step is {step}, expected at least 1")
    top_k = expert_ids.shape[1]
    ids = expert_ids.flatten().long()
    ids = torch.where(ids < 0, num_experts, ids)
    order = ids.sort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    stops = counts.cumsum(0)[:num_experts]
    counts = counts[:num_experts]
    item_stops = ((counts + step - 1) // step).cumsum(0)
    room = min(len(ids), num_experts + len(ids) // step)
    number = torch.arange(room, device=ids.device)
    expert = torch.searchsorted(item_stops, number, right=True)
    used = expert < num_experts
    expert = expert.clamp(max=num_experts - 1)
    item_starts = item_stops[expert] - (counts[expert] + step - 1) // step
    first = stops[expert] - counts[expert] + (number - item_starts) * step
    last = torch.minimum(first + step, stops[expert])
    items = torch.stack((expert, first, last), 1) * used.unsqueeze(1)
    return WorkList(items.int(), torch.div(order.indices, top_k, rounding_mode="floor"), order.indices)
