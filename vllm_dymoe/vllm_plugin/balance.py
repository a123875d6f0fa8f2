"""Expert-parallel load balancing: vLLM moves experts between ranks, of which nothing moves here but their numbers.

A *physical* expert of vLLM's has a rank and stands for an expert of the model, a busy one for several. vLLM balances by
sending the weights of physical experts from rank to rank (``rearrange_expert_weights_inplace``). Here every rank has
all experts in its host store, so what a layer hands out as weights is the number of the expert that each physical one
stands for. vLLM writes other numbers there between two steps, and the experts that they name are misses like any other.
Physical experts of one rank that stand for the same expert share its slot.
"""

from collections.abc import Mapping

import torch
from vllm.config import ParallelConfig
from vllm.distributed.eplb.eplb_state import EplbState

from vllm_dymoe.options import ConfigError


def owned(local: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which expert each physical one stands for on this rank, at first.

    ``local`` is int [physical experts], their numbers on this rank, in a row, and -1 for another rank's. Returns the
    map of a :class:`~.step.RankLayer`, and a view of this rank's part, [its physical experts, 1], for vLLM to write.
    """
    redundant = len(local) - experts
    stands_for = local.new_tensor(EplbState.build_initial_global_physical_to_logical_map(experts, redundant))
    numbers = torch.cat((torch.where(local >= 0, stands_for, -1), local.new_full((1,), -1)))
    mine = (local >= 0).nonzero().flatten()
    return numbers, numbers[int(mine[0]) : int(mine[-1]) + 1].unsqueeze(1)


def refuse_balancing(parallel: ParallelConfig, others: Mapping[str, bool]) -> None:
    """ConfigError for what does not go with it: of vLLM's options, and ``others``."""
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-elastic-ep": getattr(parallel, "enable_elastic_ep", False),
        **others,
    }
    for option, is_on in refused.items():
        if is_on and parallel.enable_eplb:
            raise ConfigError(
                f"vllm-dymoe: --enable-eplb does not go with {option}, which was not tried with experts that move "
                "between ranks; leave one of them out."
            )
