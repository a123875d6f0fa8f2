"""The number of tokens of a step, where the user has set none.

This module supplies vLLM's numbers for the rule in ``plan.choice``.
"""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dymoe.cache.budget import limit_in_bytes
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.plan.choice import chunk_of
from vllm_dymoe.plan.device import find_device
from vllm_dymoe.plan.model import shape_of
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
        device = find_device(current_platform.get_device_name(), None)
        shape = shape_of(model.hf_text_config.to_dict(), model.model)
    except ConfigError as error:
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
        "over the link. On this card that takes %.0f ms, in which so many tokens are computed; decoding requests wait "
        "as long. --max-num-batched-tokens sets another number.",
        tokens, own, size(missing), 1e3 * missing / device.link,
    )  # fmt: skip
    return tokens
