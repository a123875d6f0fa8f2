"""The number of threads that torch uses in a worker on a CPU.

The native library uses as many.
"""

import torch

from vllm_dymoe.cgroups import threads_within_quota
from vllm_dymoe.vllm_plugin.announcements import logger


def keep_to_quota(device_type: str, ranks: int) -> None:
    """Limit this thread's torch to a rank's part of a container's ``cpu.max``.

    vLLM starts a thread for each core that it may run on.
    """
    before = torch.get_num_threads()
    threads = threads_within_quota(before, ranks)
    if device_type == "cpu" and threads < before:
        torch._C.set_num_threads(threads)  # vLLM's CPU worker replaces torch.set_num_threads
        logger.info("vllm-dymoe: %d threads instead of %d, because of the container's cpu.max", threads, before)
