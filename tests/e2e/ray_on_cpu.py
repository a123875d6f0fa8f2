"""Ray's executor on a CPU, whose platform vLLM gives no name at Ray: here a CPU says that it is a GPU of Ray's.

Not "CPU": vLLM asks Ray for ``resources={key: 1}`` and for accelerators of this name, and Ray refuses "CPU" in the
former and has none in the latter. Ray is told of two GPUs that are not there; it only counts them.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension

ROOT = Path(__file__).resolve().parents[2]


def name_device():
    """In every process that looks: Ray calls it in its workers, before vLLM's actors are made."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


class RayWorker(DymoeWorkerExtension):
    """Here, since tests.e2e.engines gives each process that imports it a folder of its own for stores."""

    def process(self):
        return os.getpid(), self.vllm_config.quant_config.loaded_model().server.experts.num_experts


@contextlib.contextmanager
def cluster():
    """Ray on this machine, with room for two ranks, as long as this runs."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie in it, so that its name has to be short
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
