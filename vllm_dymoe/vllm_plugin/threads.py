"""The number of threads that torch uses in a worker on a CPU.

The native library uses as many.
"""

import os

import torch

from vllm_dymoe.cgroups import usable_cores
from vllm_dymoe.vllm_plugin.announcements import logger


def keep_to_quota(device_type: str, ranks: int) -> None:
    """Limit this thread's torch to a rank's part of a container's ``cpu.max``.

    vLLM starts a thread for each core that it may run on, and a container that has used up its share of a period
    stalls until the next one. A user's own setting is kept: VLLM_CPU_OMP_THREADS_BIND names cores, or is "nobind" with
    OMP_NUM_THREADS. (Without it vLLM itself sets OMP_NUM_THREADS in each worker.)
    """
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    said = binding != "auto" and (binding != "nobind" or "OMP_NUM_THREADS" in os.environ)
    before = torch.get_num_threads()
    threads = max(1, usable_cores(before * ranks) // ranks)
    if device_type == "cpu" and not said and threads < before:
        torch._C.set_num_threads(threads)  # vLLM's CPU worker replaces torch.set_num_threads
        logger.info("vllm-dymoe: %d threads instead of %d, because of the container's cpu.max", threads, before)
