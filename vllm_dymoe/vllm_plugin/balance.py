"""Expert-parallel load balancing (EPLB).

vLLM moves experts between ranks; here only their ids move.

A *physical* expert of vLLM belongs to a rank and represents an expert of the model; several may represent a busy one.
vLLM balances by sending the weights of physical experts from rank to rank (``rearrange_expert_weights_inplace``). Here
every rank has all experts in its host store, so a layer passes, as weights, the id of the expert that each physical
expert represents. vLLM writes other ids there between two steps, and the experts that they name are ordinary misses.
Physical experts of one rank that represent the same expert share its slot.
"""

from collections.abc import Mapping

import torch
from vllm.config import ParallelConfig
from vllm.distributed.eplb.eplb_state import EplbState

from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin.expert_ids import bounded_map


def owned(local: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which expert each physical one initially represents on this rank.

    ``local`` is int [physical experts], their numbers on this rank, consecutive, and -1 for another rank's. Returns the
    map of a :class:`~.step.RankLayer`, and a view of this rank's part, [its physical experts, 1], for vLLM to write.
    """
    redundant = len(local) - experts
    stands_for = local.new_tensor(EplbState.build_initial_global_physical_to_logical_map(experts, redundant))
    numbers = bounded_map(torch.where(local >= 0, stands_for, -1))
    mine = (local >= 0).nonzero().flatten()
    return numbers, numbers[int(mine[0]) : int(mine[-1]) + 1].unsqueeze(1)


def refuse_balancing(parallel: ParallelConfig, others: Mapping[str, bool]) -> None:
    """Check vLLM's options, and others, against load balancing.

    Args:
        others: further options that load balancing excludes, and whether each is on.

    Raises:
        ConfigError: one of them cannot be combined with it.
    """
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-elastic-ep": getattr(parallel, "enable_elastic_ep", False),
        **others,
    }
    for option, is_on in refused.items():
        if is_on and parallel.enable_eplb:
            raise ConfigError(
                f"vllm-dymoe: --enable-eplb does not support {option}, which is untested with experts that move "
                "between ranks; leave one of them out."
            )
