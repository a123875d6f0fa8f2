"""The number of tokens of a step, where the user has set none.

This module supplies vLLM's numbers for the rule in ``plan.choice``, and the link's rate as `vllm-dymoe serve` measured
it on this machine. Only if it never did, the rate is that of the card's data sheet.
"""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dymoe.cache.budget import limit_in_bytes
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import ConfigError, Options, cache_folder, store_root
from vllm_dymoe.plan.choice import chunk_of
from vllm_dymoe.plan.device import Device, find_device
from vllm_dymoe.plan.machine import KEPT, Probe, kept_machine
from vllm_dymoe.plan.model import config_folder, read_shape
from vllm_dymoe.plan.start import read_model
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger

_SHARE = 0.8  # of the memory that vLLM may use, for weights if the budget is automatic


def larger_chunk(config: VllmConfig, experts: ModelExperts | None, options: Options) -> int | None:
    """Return a value for ``max_num_batched_tokens``, and log why.

    None for vLLM's own choice.
    """
    scheduler, model = config.scheduler_config, config.model_config
    if current_platform.device_type != "cuda" or experts is None or not scheduler.enable_chunked_prefill:
        return None
    try:
        folder = str(config_folder(model.model, model.revision, model.hf_token))
        measured = measured_device(folder, options)
        device = measured or find_device(current_platform.get_device_name(), None)
        shape = read_shape(folder)
    except (ConfigError, CheckpointError) as error:
        logger.info("vllm-dymoe: --max-num-batched-tokens is left to vLLM, because %s", error)
        return None
    usable = int(config.cache_config.gpu_memory_utilization * device.memory * _SHARE) - shape.dense_bytes
    everything = experts.nbytes(options.high)
    missing = max(0, everything - limit_in_bytes(options.expert_budget, experts, options, 0, max(0, usable)))
    own = scheduler.max_num_batched_tokens
    tokens = min(chunk_of(missing, shape, device), scheduler.max_num_seqs * model.max_model_len)
    if tokens <= own:
        return None
    logger.info(
        "vllm-dymoe: a step has up to %d tokens in place of vLLM's %d, because each chunk of a prompt moves about %s "
        "over the link. At %.1f GB/s, %s, that takes %.0f ms, in which so many tokens are computed; decoding requests "
        "wait as long. --max-num-batched-tokens sets another number.",
        tokens, own, size(missing), device.link / 1e9,
        "as measured here" if measured else "by the card's data sheet", 1e3 * missing / device.link,
    )  # fmt: skip
    return tokens


def measured_device(model: str, options: Options) -> Device | None:
    """Return this machine's GPU as an earlier start measured it for a model.

    None if none did: reading a kept measurement takes no time, a new one takes seconds.
    """
    try:
        probe = Probe.of(store_root(options.store_dir), read_model(model).shape)
        kept = kept_machine(probe, cache_folder() / KEPT)
    except (ConfigError, CheckpointError, OSError, ValueError):  # a model that `serve` does not know
        return None
    return kept.device() if kept is not None and kept.gpus else None
