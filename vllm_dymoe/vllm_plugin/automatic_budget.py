"""The size of an automatic budget.

This module supplies vLLM's numbers for the rule in ``executor.device_share``.
"""

import os
from collections import Counter

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_dymoe.cache.budget import check_in_host_memory, limit_in_bytes, minimum_budget
from vllm_dymoe.cache.device_memory import CudaMemory
from vllm_dymoe.cache.pages import available_host_memory
from vllm_dymoe.cache.store.memory import host_memory_bytes
from vllm_dymoe.executor.device_share import StepShape, automatic_share
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import Options
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.model_files import ranks_of_machine

# On a CPU the "device" is the machine's memory, which other processes use, too.
_SHARE_OF_FREE_HOST_MEMORY = 0.5


def automatic_budget(
    vllm_config: VllmConfig, device: torch.device, experts: ModelExperts, least: int, requests: int = 1
) -> int:
    """Return the bytes for this rank's experts, once the dense weights are loaded.

    On CUDA this is what ``gpu_memory_utilization`` leaves after the KV cache of ``requests`` of ``max_model_len``
    tokens and the activations of a step; on a CPU half of what is available after the KV cache, divided equally among
    the ranks. ConfigError if it is less than ``least``.
    """
    if device.type == "cpu":
        cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 4) * 2**30)
        ranks = ranks_of_machine(vllm_config.parallel_config)
        return int(max(0, available_host_memory() // ranks - cache) * _SHARE_OF_FREE_HOST_MEMORY)
    free, cache_config, model = CudaMemory(device).available(), vllm_config.cache_config, vllm_config.model_config
    kv_cache = cache_config.kv_cache_memory_bytes
    if kv_cache is None:
        kv_cache = requests * kv_cache_bytes(vllm_config)
        # vLLM takes its share of the whole device, so memory that others use there counts against it.
        free -= int((1 - cache_config.gpu_memory_utilization) * torch.cuda.mem_get_info(device)[1])
    activations = step_shape(vllm_config, experts).nbytes
    fixed = model.original_max_model_len != -1
    return automatic_share(free, kv_cache, activations, least, model.max_model_len, fixed=fixed, requests=requests)


def leave_room(vllm_config: VllmConfig, server: ExpertServer, available: int) -> int:
    """Return the bytes of vLLM's KV cache after its profile run.

    If an automatic budget leaves less than its requests of ``max_model_len`` tokens need, the budget shrinks by the
    difference. A budget that the user set stays, and so do those of ranks that add up parts of the same experts.

    Args:
        available: bytes that the profile run left; the result adds what experts gave up.
    """
    fixed = vllm_config.model_config.original_max_model_len != -1
    if not (server.options.expert_budget.is_auto and fixed) or server.ranks_add_up:
        return available
    limit, requests = server.slot_plan.limit, server.options.expert_budget.requests
    needed = requests * kv_cache_bytes(vllm_config)
    missing = needed - available
    policy, workspace = server.policy, server.slot_plan.workspace_bytes
    if missing <= 0 or limit - missing < minimum_budget(server.experts, server.options, policy, workspace):
        return available
    server.resize(limit - missing)
    logger.info(
        "vllm-dymoe: %d concurrent requests of %d tokens need %s more of KV cache than vLLM's profile run left; "
        "expert_budget is %d bytes in place of %d",
        requests, vllm_config.model_config.max_model_len, size(missing), limit - missing, limit,
    )  # fmt: skip
    return needed


def budget_in_host_memory(options: Options, experts: ModelExperts, automatic: int, workspace: int) -> int:
    """Return the budget on a CPU: ``host_memory``, or ``automatic`` if that is unset.

    Raises:
        ConfigError: an ``expert_budget`` that the user set exceeds ``host_memory``.
    """
    allowed = host_memory_bytes(options.host_memory, experts)
    if allowed is None:
        return automatic
    if not options.expert_budget.is_auto:
        asked = limit_in_bytes(options.expert_budget, experts, options, workspace, automatic)
        check_in_host_memory(asked, allowed)
    return allowed


def kv_cache_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of KV cache that one request needs in this rank's layers.

    The request has ``max_model_len`` tokens.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    own = (layer for layer in layers if not getattr(layer, "kv_sharing_target_layer_name", None))
    specs = [spec for layer in own if (spec := layer.get_kv_cache_spec(vllm_config)) is not None]
    kinds = Counter((spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in specs)
    # Kinds of layers share blocks in groups of equal size, which vLLM fills up with layers that do not exist.
    group = min(kinds.values(), default=1)
    # One block of each group is vLLM's own.
    return sum((request + page) * (-(-count // group) * group) for (request, page), count in kinds.items())


def step_shape(vllm_config: VllmConfig, experts: ModelExperts) -> StepShape:
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    graphs = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE) and not model.enforce_eager
    sizes = (compilation.cudagraph_capture_sizes or []) if graphs else []
    heads = model.get_num_attention_heads(parallel) + 2 * model.get_num_kv_heads(parallel)
    return StepShape(
        # Tokens of all engines are exchanged before the experts.
        tokens=scheduler.max_num_batched_tokens * parallel.data_parallel_size,
        sequences=scheduler.max_num_seqs,
        hidden=model.get_hidden_size(),
        attention=heads * model.get_head_size(),
        intermediate=next(iter(experts.formats.values())).intermediate,
        top_k=experts.top_k,
        vocabulary=model.get_vocab_size(),
        itemsize=model.dtype.itemsize,
        graph_tokens=max(sizes, default=0),
        # If graphs are split, a layer has two pieces.
        graphs=len(sizes) * (2 * model.get_num_layers(parallel) + 1),
    )
