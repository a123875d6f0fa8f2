"""Import vLLM as the tests' engines use it.

Work that only a long-lived server needs is switched off. The fork server of ``forked`` imports this module once for
all child processes.
"""

import atexit
import functools
import gc
import importlib

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms.cpu import CpuPlatform

for _name in (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm_dymoe.vllm_plugin.patches",
    "vllm_dymoe.vllm_plugin.quant_config",
):
    importlib.import_module(_name)

freeze = gc.freeze
atexit.register(gc.unfreeze)  # otherwise libraries report leaks at exit
# vLLM collects garbage nine times while an engine starts and ends, each time for 0.3 s because of its many modules.
# They are frozen below, once. An engine must not freeze what it allocates, so that its reference cycles are freed.
gc.freeze = gc.unfreeze = lambda: None
# vLLM searches every module for copies of the same kernels, again for each engine (0.8 s).
CpuPlatform.register_triton_kernel_overrides = staticmethod(
    functools.cache(CpuPlatform.register_triton_kernel_overrides)
)
# A rank that waits for its next step spins for a second, on a core that the others need.
SpinCondition.__init__.__defaults__ = (0.02,)

gc.collect()
freeze()
