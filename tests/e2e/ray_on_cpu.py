"""Ray's executor on a CPU that claims to be a GPU.

vLLM knows no Ray resource for CPUs. "CPU" would not do: vLLM asks Ray for ``resources={key: 1}`` and for accelerators
of this name; Ray refuses "CPU" as a resource, and knows no accelerator of that name. Ray is told of two GPUs that do
not exist; it only counts them.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension

ROOT = Path(__file__).resolve().parents[2]


def name_device():
    """Let vLLM ask Ray for GPUs; Ray calls this in its workers before vLLM's actors."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


class RayWorker(DymoeWorkerExtension):
    """The worker extension of the test.

    It is not defined in tests.e2e.engines, which gives each process that imports it its own folder for stores.
    """

    def process(self):
        return os.getpid(), self.vllm_config.quant_config.loaded_model().server.experts.num_experts


@contextlib.contextmanager
def cluster():
    """Run Ray on this machine, with room for two ranks, during a ``with`` block."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # it contains sockets, so its name has to be short
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    name_device()
    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=folder,
        runtime_env={"worker_process_setup_hook": f"{__name__}.name_device", "env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
