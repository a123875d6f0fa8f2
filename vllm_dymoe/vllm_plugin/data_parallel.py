"""Data parallelism with expert parallelism.

The tokens of all ranks are exchanged at each rank's experts. vLLM runs the ranks' models in lockstep: a rank without
requests computes a dummy batch meanwhile. Each rank sends its rows to all others, computes its own experts for all
rows, and receives the sums for its rows. Only a rank itself knows which of its rows are tokens, so they are marked
before they are sent: padding is not a use of an expert.
"""

from typing import Any

import torch
from vllm.distributed import get_ep_group

from vllm_dymoe.executor.small_batch import SmallBatches
from vllm_dymoe.planner.routing import Phase

_NOTHING, _DECODED, _PREFILLED = range(3)


class Gathered:
    """Tokens of all ranks in a layer: x, weights, ids.

    The phase is prefill if any rank processes a prompt.
    """

    def __init__(
        self,
        x: torch.Tensor,  # [rows, hidden] of this rank
        weights: torch.Tensor,  # float32 [rows, top_k]
        ids: torch.Tensor,  # int [rows, top_k]
        tokens: int,  # how many of the rows, which come first, are tokens
        phase: Phase,  # of this rank's step
        *,
        sequence_parallel: bool,  # ranks of tensor parallelism have parts of the rows
    ) -> None:
        self._sequence_parallel = sequence_parallel
        marks = torch.zeros(len(x), dtype=torch.uint8, device=x.device)
        marks[:tokens] = _PREFILLED if phase is Phase.PREFILL else _DECODED
        x, weights, ids, (marks,) = get_ep_group().dispatch(x, weights, ids, sequence_parallel, [marks])
        self._shape = x.shape
        self._rows = marks.nonzero().flatten()
        self.phase = Phase.PREFILL if bool((marks == _PREFILLED).any()) else Phase.DECODE
        self.x, self.weights, self.ids = x[self._rows], weights[self._rows], ids[self._rows]

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        """Add the outputs of all ranks' experts.

        Maps [tokens of all ranks, hidden] to [rows of this rank, hidden].
        """
        everything = out.new_zeros(self._shape)
        everything[self._rows] = out
        combined: torch.Tensor = get_ep_group().combine(everything, self._sequence_parallel)
        return combined


class GatheredOnDevice:
    """Rows of all ranks in a device-planned layer.

    As :class:`Gathered`, but in fixed places and without the host: rows that are no tokens have no experts.

    Args:
        small_batches: what runs the layer; it knows how many tokens this rank has, and is told of those of all ranks.
        part: which of the step's rows a rank of tensor parallelism has; None where each has all.

    Attributes:
        x, weights, ids: of all rows of all ranks; ids are -1 in rows that are no tokens.
    """

    def __init__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, small_batches: SmallBatches, part: int | None
    ) -> None:  # fmt: skip
        self._sequence_parallel = part is not None
        ids = small_batches.own_tokens(ids, len(ids) * (part or 0))
        self.x, self.weights, self.ids = get_ep_group().dispatch(x, weights, ids, self._sequence_parallel)
        small_batches.meet(self.ids)

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        """Add the outputs of all ranks' experts.

        Maps [rows of all ranks, hidden] to [rows of this rank, hidden].
        """
        combined: torch.Tensor = get_ep_group().combine(out, self._sequence_parallel)
        return combined


def own_tokens(tokens: int, rows: int, rank: int) -> int:
    """Return how many of a rank's rows are tokens.

    Tensor-parallel ranks have consecutive parts of the rows.
    """
    return min(max(tokens - rank * rows, 0), rows)


def gather_rows(group: Any, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """Gather the rows of all ranks through a CpuCommunicator.

    Args:
        group: the communicator.
        tensors: [rows of this rank, ...] each.
        sizes: the number of rows of each rank.

    Returns:
        [rows of all ranks, ...] for each tensor.
    """
    longest, found = max(sizes), []
    for tensor in tensors:
        padded = tensor.new_zeros(longest, *tensor.shape[1:])  # a collective of gloo needs parts of equal size
        padded[: len(tensor)] = tensor
        parts = tensor.new_empty(len(sizes), longest, *tensor.shape[1:])
        sent, received = padded.view(torch.uint8), parts.flatten(0, 1).view(torch.uint8)
        torch.distributed.all_gather_into_tensor(received, sent, group.device_group)
        found.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return found


def add_rows(group: Any, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Add the ranks' rows, in the order of ranks, and return this rank's.

    Args:
        group: a CpuCommunicator.
        tensor: [rows of all ranks, hidden].
        sizes: the number of rows of each rank.

    Returns:
        [rows of this rank, hidden].
    """
    rows, width = sizes[group.rank_in_group], tensor.shape[1:].numel() * tensor.itemsize
    parts = torch.empty(len(sizes) * rows, width, dtype=torch.uint8)
    sent = tensor.contiguous().view(len(tensor), -1).view(torch.uint8)
    torch.distributed.all_to_all_single(parts, sent, [rows] * len(sizes), sizes, group=group.device_group)
    summed = parts.view(tensor.dtype).view(len(sizes), rows, *tensor.shape[1:]).sum(0, dtype=torch.float32)
    return summed.to(tensor.dtype)
