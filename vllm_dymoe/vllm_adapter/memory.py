"""How much device memory an automatic budget takes."""

import os

import torch
from vllm.config import VllmConfig

from vllm_dymoe.experts.memory import available_host_memory

# Of the memory that vLLM may use and the dense weights have left; the rest is for the KV cache and activations.
_SHARE_OF_FREE_DEVICE_MEMORY = 0.7
# On a CPU the "device" is the machine's memory, which other processes use too.
_SHARE_OF_FREE_HOST_MEMORY = 0.5
_GIB = 2**30


def automatic_budget(vllm_config: VllmConfig, device: torch.device) -> int:
    """Bytes for experts, after the dense weights were loaded.

    On CUDA 70 % of what ``gpu_memory_utilization`` leaves; on a CPU half of the
    available memory after the KV cache's share (``VLLM_CPU_KVCACHE_SPACE``), in
    equal parts for the ranks, which share that memory.
    """
    if device.type == "cpu":
        cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 4) * _GIB)
        ranks = vllm_config.parallel_config.world_size
        return int(max(0, available_host_memory() // ranks - cache) * _SHARE_OF_FREE_HOST_MEMORY)
    free, total = torch.cuda.mem_get_info(device)
    allowed = vllm_config.cache_config.gpu_memory_utilization * total - (total - free)
    return int(max(0, allowed) * _SHARE_OF_FREE_DEVICE_MEMORY)
