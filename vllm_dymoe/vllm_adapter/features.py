"""Features of vLLM that do not go together with streamed experts, each refused by its name before anything loads."""

from collections.abc import Callable

from vllm import envs
from vllm.config import VllmConfig

from vllm_dymoe.config import ConfigError

RELOADING = (
    "vllm-dymoe: weights cannot be replaced while the model is served, because its experts are packed in a store; "
    "nothing was changed: start again with the new checkpoint."
)


def refuse_unsupported_features(config: VllmConfig) -> None:
    """Refuse the first feature that is on and cannot work.

    Raises:
        ConfigError: there is one.
    """
    for is_on, sentence in _UNSUPPORTED:
        if is_on(config):
            raise ConfigError(f"vllm-dymoe: {sentence}")


def _adapts_experts(config: VllmConfig) -> bool:
    """Whether LoRA may reach the experts: vLLM wraps every layer unless target modules leave it out."""
    lora = config.lora_config
    if lora is None:
        return False
    # "experts" stands for the whole layer, "experts.3.up_proj" for one of its projections.
    return lora.target_modules is None or any("experts" in name.split(".") for name in lora.target_modules)


def _drafts_with_experts(config: VllmConfig) -> bool:
    draft = getattr(config.speculative_config, "draft_model_config", None)
    # Methods without a draft model, such as ngram, have the target's own config there.
    return draft is not None and draft is not config.model_config and draft.get_num_experts() > 0


def _bypasses_the_worker(config: VllmConfig) -> bool:
    """Whether vLLM's first executor for Ray is asked for, which 0.33 has no more; its graphs call the model runner."""
    is_ray = config.parallel_config.distributed_executor_backend == "ray"
    return is_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


_UNSUPPORTED: tuple[tuple[Callable[[VllmConfig], bool], str], ...] = (
    (
        _adapts_experts,
        "LoRA on the experts is not supported; name the layers that adapters may change with --lora-target-modules, "
        "for instance q_proj k_proj v_proj o_proj.",
    ),
    (
        lambda config: config.parallel_config.enable_eplb,
        "expert-parallel load balancing is not supported, because every rank has a store of its own experts; "
        "leave --enable-eplb out.",
    ),
    (
        lambda config: config.parallel_config.data_parallel_size > 1,
        "data parallelism is not supported; leave --data-parallel-size out, and start one server for each replica.",
    ),
    (
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        "prefill context parallelism is not supported, because a rank cannot tell which tokens of a step are its own; "
        "leave --prefill-context-parallel-size out.",
    ),
    (
        lambda config: config.parallel_config.use_ubatching,
        "micro-batches that run at the same time are not supported, because layers have to come one after the other; "
        "leave --enable-dbo and --ubatch-size out.",
    ),
    (
        _bypasses_the_worker,
        "Ray's compiled graphs do not call the worker, so that nobody would know where a step begins; set "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or use --distributed-executor-backend mp.",
    ),
    (
        lambda config: getattr(config.speculative_config, "enable_adaptive_verification", False),
        "adaptive verification of drafts is not supported, because it leaves out tokens that were scheduled; set "
        '"enable_adaptive_verification": false in --speculative-config.',
    ),
    (
        _drafts_with_experts,
        "a speculative draft model with experts of its own is not supported; use a dense draft model or the method "
        "ngram in --speculative-config.",
    ),
    (
        lambda config: bool(getattr(config.model_config, "enable_sleep_mode", False)),
        "sleep mode is not supported, because experts in their slots would not survive it; leave --enable-sleep-mode "
        "out, and lower the budget with dymoe_resize to give their memory back to the device.",
    ),
    (
        lambda config: getattr(config, "weight_transfer_config", None) is not None,
        "weight transfer is not supported, because the experts are packed in a store; leave --weight-transfer-config "
        "out.",
    ),
)
