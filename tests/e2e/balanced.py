"""Runs vLLM's expert-parallel load balancing on a CPU that claims to be an XPU.

This module adds what vLLM's CPU platform lacks: a model runner that creates an ``EplbState``, and a replacement for the
Triton kernel that maps the routers' choices to physical experts. Maps, policy, steps and messages are vLLM's.
"""

import contextlib
from unittest import mock

import torch
from vllm.distributed.eplb import eplb_state
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension

SETTINGS = {
    "enable_eplb": True,
    "eplb_config": {
        "num_redundant_experts": 4, "step_interval": 5, "window_size": 5, "use_async": False,
        "communicator": "torch_gloo",
    },
    "worker_extension_cls": f"{__name__}.BalancedWorker",
}  # fmt: skip


@contextlib.contextmanager
def configurable():
    with mock.patch("vllm.config.parallel.current_platform") as platform:
        platform.is_cuda_alike.return_value = platform.is_cuda.return_value = platform.is_tpu.return_value = False
        platform.is_xpu.return_value = True
        platform.device_count.return_value = 2
        yield


class BalancedWorker(DymoeWorkerExtension):
    """vLLM imports this module in each worker before it creates the worker."""

    def numbers(self):
        """Return the maps of all ranks and of this rank, [layers, physical experts].

        They hold the logical expert of each physical one. The rank's own map is read from its weights.
        """
        (state,) = self.model_runner.eplb_state.model_states.values()
        mine = torch.stack([numbers.flatten() for (numbers,) in state.model.expert_weights])
        return state.physical_to_logical_map.clone(), mine.clone()


def _load_model(self, *arguments, **settings):
    _original_load(self, *arguments, **settings)
    self._moe_model, self.eplb_state = self.model, eplb_state.EplbState(self.parallel_config, self.device)
    self.eplb_state.add_model(self.model, self.model_config)


def _map_and_record(
    topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count, record_enabled, num_unpadded_tokens
):
    ids = topk_ids.long()
    which = torch.arange(len(ids)).unsqueeze(1) * 2654435769 % 2**32 % logical_replica_count[ids]
    physical = logical_to_physical_map[ids, which]
    if record_enabled:
        expert_load_view += physical[:num_unpadded_tokens].flatten().bincount(minlength=len(expert_load_view))
    return physical.to(topk_ids.dtype)


class _Event(torch.Event):
    """Replaces vLLM's CPU event, which has no ``elapsed_time``."""

    def elapsed_time(self, other):
        return 0.0


_original_load = CPUModelRunner.load_model
CPUModelRunner.load_model = _load_model
base_router.eplb_map_to_physical_and_record = _map_and_record
torch.Event = _Event
torch.accelerator.current_stream = lambda *_: mock.MagicMock()
