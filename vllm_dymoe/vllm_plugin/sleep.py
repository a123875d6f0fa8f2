"""Sleep and wake, and what follows: slots go and come back beside vLLM's weights and KV cache.

On CUDA vLLM makes a model in a memory pool, which it unmaps while the engine sleeps: at level 1 with a copy in host
memory, at level 2 without. Slots are made past it, since their bytes are in the store: they need no copy. So is what a
device decides by, whose values captured graphs go on reading behind a sleep at level 2.
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
    """What ``make`` returns, whose device memory is not vLLM's pool's: ``torch.cuda.use_mem_pool`` is for the thread
    that entered it."""
    pooled = getattr(config.model_config, "enable_cumem_allocator", False)
    if not pooled or config.device_config.device_type != "cuda":
        return make()
    device, context = torch.cuda.current_device(), contextvars.copy_context()

    def run() -> Made:
        torch.cuda.set_device(device)  # a new thread begins on the first
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(context.run, run).result()


def check_reloading(config: VllmConfig, rank: RankServer | None, *, other: bool) -> None:
    """Refuse (ConfigError) to read weights again, unless they are those of 16 bits that are served, which a sleep at
    level 2 has lost: the experts stay as they are packed."""
    why = "its experts are packed in a store; start again with the new checkpoint"
    if not other:
        why = "" if rank is None else config.quant_config.loading.not_readable_again
    if why and config.model_config.quantization == "dymoe":
        raise ConfigError(f"vllm-dymoe: weights cannot be replaced while the model is served, because {why}.")
