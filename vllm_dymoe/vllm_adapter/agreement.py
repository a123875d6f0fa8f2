"""Ranks that have parts of the same experts change versions in the same step, or a sum would be of two precisions."""

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group

from vllm_dymoe.runtime.migration import Agree


def agreement(config: VllmConfig) -> Agree:
    """The least of what the ranks of tensor parallelism say; with expert parallelism each rank has whole experts."""
    parallel = config.parallel_config
    return list if parallel.tensor_parallel_size == 1 or parallel.enable_expert_parallel else _least


def _least(said: Sequence[int]) -> Sequence[int]:
    numbers = torch.tensor(said, dtype=torch.int64, device="cpu")
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    found: list[int] = numbers.tolist()
    return found
