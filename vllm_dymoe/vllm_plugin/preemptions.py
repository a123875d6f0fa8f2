"""What to do about requests that vLLM preempts.

vLLM preempts them because its KV cache is full. Experts can give up memory for that cache.
"""

from typing import Any

from vllm_dymoe.cache.budget import minimum_budget
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger


class Preemptions:
    """Watches the scheduler's steps, and proposes a smaller expert budget.

    There is one proposal for each budget.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()

    def see(self, scheduler_output: Any, runner: Any, server: ExpertServer) -> None:
        """Log a proposal if the scheduler has preempted requests for this step."""
        preempted = len(getattr(scheduler_output, "preempted_req_ids", None) or ())
        if not preempted or server.slot_plan.limit in self._told:
            return
        plan = server.slot_plan
        config = getattr(runner, "kv_cache_config", None)
        nbytes = sum(tensor.size for tensor in getattr(config, "kv_cache_tensors", ()))
        if not nbytes:
            return
        self._told.add(plan.limit)
        least = minimum_budget(server.experts, server.options, server.policy, plan.workspace_bytes)
        running = max(1, len(scheduler_output.num_scheduled_tokens))
        own = not server.options.plain_cpu(server.device.type)  # an emulated card is served as a card
        logger.warning("%s", proposal(running, preempted, nbytes, plan.limit, least, own_memory=own))


def proposal(running: int, preempted: int, kv_cache: int, limit: int, least: int, *, own_memory: bool) -> str:
    """Return a sentence that says what would have kept the preempted requests.

    Args:
        running: requests that stayed; they fill the KV cache.
        preempted: requests that had to leave it.
        kv_cache: bytes of the cache, which vLLM sizes at start.
        limit: the expert budget in bytes.
        least: the smallest feasible one.
        own_memory: the device has memory of its own, which the cache and the budget share.
    """
    needed = -(-kv_cache * (running + preempted) // running)
    missing = needed - kv_cache
    said = (
        f"vllm-dymoe: vLLM preempted {preempted} of {running + preempted} requests, because its KV cache of "
        f"{size(kv_cache)} is full; all of them need about {size(needed)}."
    )
    fewer = f"--max-num-seqs {running} makes them wait instead"
    if not own_memory:
        return f"{said} Start with VLLM_CPU_KVCACHE_SPACE={max(1, -(-needed // 2**30))}; {fewer}."
    if limit - missing < least:
        return f"{said} Experts cannot spare that: they have {limit} bytes and need {least}; {fewer}."
    return (
        f"{said} dymoe_resize({limit - missing}), from {limit}, moves experts out of {size(missing)}. vLLM sizes its "
        f"cache at start, so start with expert_budget {limit - missing} for it to have them; {fewer}."
    )
