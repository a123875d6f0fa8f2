"""Chooses the number of tokens of a step from the time that a chunk of a prompt takes on the link.

Nearly every expert is active in a chunk. So a chunk fetches every expert that is not resident, however many tokens it
has, and concurrently decoding requests wait for it. With as many tokens as the device computes in that time, a prompt
needs the fewest chunks, and no chunk takes longer than the link.
"""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dymoe.cache.budget import limit_in_bytes
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.plan.device import Device, find_device
from vllm_dymoe.plan.model import ModelShape, shape_of
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import logger

_STEP, _MOST = 512, 8192
_SHARE = 0.8  # of the memory that vLLM may use, for weights if the budget is automatic


def chunk_of(missing: int, shape: ModelShape, device: Device) -> int:
    """Return the tokens that are computed while ``missing`` bytes of experts arrive, a multiple of 512 up to 8192.

    0 if no bytes are missing.
    """
    weights = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    tokens = missing / device.link * device.compute / (2 * weights)
    return min(_MOST, -(-int(tokens) // _STEP) * _STEP)


def larger_chunk(config: VllmConfig, experts: ModelExperts | None, options: Options) -> int | None:
    """Return a value for ``max_num_batched_tokens`` if the user set none, and log why; None for vLLM's own choice."""
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
        "vllm-dymoe: a step has up to %d tokens (vLLM's choice was %d), because each chunk of a prompt moves about %s "
        "over the link, %.0f ms on this card, the time to compute as many tokens; decoding requests wait as long for "
        "it. --max-num-batched-tokens sets another number.",
        tokens, own, size(missing), 1e3 * missing / device.link,
    )  # fmt: skip
    return tokens
