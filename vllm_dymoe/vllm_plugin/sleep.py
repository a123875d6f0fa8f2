"""Sleep and wake of an engine.

Slots are freed and allocated again together with vLLM's weights and KV cache.

On CUDA vLLM makes a model in a memory pool, which it unmaps while the engine sleeps: at level 1 with a copy in host
memory, at level 2 without. Slots are allocated outside of the pool and need no copy, since their bytes are in the
store. So are the tables for device-side planning, whose values captured graphs continue to read after a sleep at level
2.
"""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from vllm.config import VllmConfig

from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin.rank_server import RankServer

Made = TypeVar("Made")


def past_the_pool(config: VllmConfig, make: Callable[[], Made]) -> Made:
    """Return ``make()``, run with device memory outside of vLLM's pool.

    It runs in another thread, because ``torch.cuda.use_mem_pool`` applies to one thread.
    """
    pooled = getattr(config.model_config, "enable_cumem_allocator", False)
    if not pooled or config.device_config.device_type != "cuda":
        return make()
    device, context = torch.cuda.current_device(), contextvars.copy_context()

    def run() -> Made:
        torch.cuda.set_device(device)  # a new thread starts on the first
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(context.run, run).result()


def check_reloading(config: VllmConfig, rank: RankServer | None, *, other: bool) -> None:
    """Refuse to reload weights while a model is served.

    The served 16-bit weights may be reloaded after a sleep at level 2; experts stay packed as they are.

    Args:
        other: other weights are asked for.

    Raises:
        ConfigError: the weights cannot be reloaded.
    """
    why = "its experts are packed in a store; restart the server with the new checkpoint"
    if not other:
        why = "" if rank is None else config.quant_config.loading.not_readable_again
    if why and config.model_config.quantization == "dymoe":
        raise ConfigError(f"vllm-dymoe: weights cannot be replaced while the model is served, because {why}.")
