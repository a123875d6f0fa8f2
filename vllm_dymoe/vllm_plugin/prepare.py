"""Checks and settings in the user's process.

They come after vLLM has made its configuration and before anything loads.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import LoRAConfig, VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from vllm_dymoe.cache.budget import limit_in_bytes, plan_slots, workspace_bytes
from vllm_dymoe.cache.pages import available_host_memory
from vllm_dymoe.cache.store import HostRoom, StoreError, choose_host_place
from vllm_dymoe.experts.encoding import LATTICES
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, stored_formats
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.plan.here import choose_here
from vllm_dymoe.plan.model import is_moe
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.start import Asked, read_model
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch.checkpoint import PredictorError, read_card
from vllm_dymoe.quantize.model_config import EXPERT_INPUTS, TOP_K, has_gate
from vllm_dymoe.quantize.readers.base import PLAIN_READER, format_fields, kept_format, own_formats
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.resolve import options_of_environment
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.balance import refuse_balancing
from vllm_dymoe.vllm_plugin.chunks import larger_chunk
from vllm_dymoe.vllm_plugin.dense import check_dense
from vllm_dymoe.vllm_plugin.graphs import settle_graphs
from vllm_dymoe.vllm_plugin.model_files import (
    check_checkpoint,
    check_ranks,
    drafted_by_experts,
    expert_ranks,
    has_drafts,
    local_folder,
    meets,
    ranks_of_machine,
    replicas_of_machine,
)
from vllm_dymoe.vllm_plugin.quant_config import expert_width, read_options

_TRACK = "enable_weights_track"
WORKER_EXTENSION = "vllm_dymoe.vllm_plugin.worker.DymoeWorkerExtension"


def prepare(config: VllmConfig) -> None:
    """Check and complete a configuration of vLLM for serving with dymoe.

    Host code is kept out of CUDA graphs, and the worker methods are added.

    Raises:
        ConfigError: something in it cannot work.
    """
    ours, reader = _quantized(config)
    options = read_options(config, ours, reader)
    try:
        _refuse_model(config)
        refuse_unsupported_features(config)
        if drafted_by_experts(config):
            _refuse_drafts(config, ours, options)
        if ours is not None and config.load_config.load_format != "dummy":
            if away := config.model_config.model_weights:
                raise ConfigError(
                    f"vllm-dymoe: packed experts are read from a disk, and {away} is in an object store; copy the "
                    "checkpoint to a folder and serve that."
                )
            check_ranks(Path(config.model_config.model), config.parallel_config.tensor_parallel_size)
        _refuse_data_parallel(config, options)
        _refuse_training(config, options)
        _refuse_recorded_stages(config, options)
        drafted, traced = drafted_by_experts(config), options.trace is not None
        refuse_balancing(config.parallel_config, {"--speculative-config": drafted, "trace": traced})
        experts = experts_of(config, options)
        if experts is not None:
            _check_memory(config, experts, options)
        if options.predictor_file is not None:
            read_card(options.predictor_file)  # the worker checks that it is for this model
        check_checkpoint(config, reader)
    except (StoreError, PredictorError, CheckpointError) as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error
    if current_platform.support_static_graph_mode():
        policy, share = make_policy(options), options.expert_budget
        there = (policy.residency.migrating is not None and not policy.residency.rescues) or (
            (share.share or 0) >= 1 and len(policy.precision.precisions) == 1
        )
        recorded = options.trace is not None
        over_layers = options.trace is None or not options.trace.inputs
        settle_graphs(config, over_layers=over_layers, recorded=recorded, complete=there and not recorded)
    _add_worker_methods(config)
    _ask_for_every_weight(config)


def chosen_options(config: VllmConfig) -> dict[str, Any] | None:
    """Return additional_config with the options that `vllm-dymoe serve` would choose.

    None if the user has set an option, or says with an empty ``dymoe`` that the defaults are to be taken.
    """
    additional, model, parallel = config.additional_config, config.model_config, config.parallel_config
    told = options_of_environment(os.environ)
    if not isinstance(additional, Mapping) or "dymoe" in additional or told.keys() - {"store_dir"}:
        return None
    if config.load_config.load_format == "dummy" or config.speculative_config is not None:
        return None
    cached, steps = config.cache_config, config.scheduler_config
    sizes = parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.pipeline_parallel_size
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    try:
        check_dense(Options(dense=8), quantized=config.lora_config is not None)
    except ConfigError:  # only 16 bits are possible here
        told = {"dense": 16, **told}
    try:
        asked = Asked(
            told, max_model_len=model.max_model_len, max_num_batched_tokens=steps.max_num_batched_tokens,
            kv_cache_dtype=str(cached.cache_dtype), gpu_memory_utilization=cached.gpu_memory_utilization,
            prefix_caching=cached.enable_prefix_caching,
            kv_cache_space=float(space) if space else None, ranks=Ranks(*sizes, ep=parallel.enable_expert_parallel),
        )  # fmt: skip
        here, start = choose_here(read_model(str(model.model), model.revision, model.hf_token), asked)
    except (ConfigError, CheckpointError, OSError, ValueError) as error:
        logger.warning("vllm-dymoe: nothing was chosen for this machine, and the defaults are used, because %s", error)
        return None
    logger.info(
        "vllm-dymoe: no option was set, so `vllm-dymoe serve` chooses: %s (predicted: %.3g tokens/s); "
        "set additional_config.dymoe to {} for the defaults.", json.dumps(dict(start.options)), start.tokens_per_second,
    )  # fmt: skip
    if here.disturbed:
        logger.warning(
            "vllm-dymoe: others used %.0f%% of the cores while this machine was measured, so its rates may be too low; "
            "the next start measures again.", 100 * here.others,
        )  # fmt: skip
    return {**additional, "dymoe": dict(start.options)}


def tokens_of_step(config: VllmConfig) -> int | None:
    """Return the number of tokens of a step, see :func:`~.chunks.larger_chunk`.

    Raises:
        ConfigError: an option is invalid.
    """
    options = read_options(config, *_quantized(config))
    return larger_chunk(config, experts_of(config, options) if config.model_config.get_num_experts() else None, options)


def refuse_idle_options(config: VllmConfig) -> None:
    """Refuse options of ours if the plugin is not in use.

    Raises:
        ConfigError: there are such options; the model would not be offloaded.
    """
    additional = config.additional_config
    if isinstance(additional, Mapping) and "dymoe" in additional:
        raise ConfigError(
            "vllm-dymoe: additional_config.dymoe is set, but the model is not served with dymoe; "
            "add --quantization dymoe, or leave additional_config.dymoe out."
        )


def refuse_adapted_experts(model: Any, path: str, adapter: Any) -> None:
    """Refuse an adapter for packed experts.

    vLLM itself leaves such weights out silently.

    Args:
        adapter: a LoRAModel.

    Raises:
        ConfigError: it has weights for packed experts.
    """
    from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod  # not before vLLM has decided about graphs

    changed = [name for name in adapter.loras if _of_experts(name)]
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    if changed and any(isinstance(method, DymoeMoEMethod) for method in methods):
        raise ConfigError(
            f"vllm-dymoe: the adapter {path} changes experts ({changed[0]} and {len(changed) - 1} more), which are "
            "packed; use an adapter without experts, or merge it into the checkpoint and serve that."
        )


def experts_of(config: VllmConfig, options: Options) -> ModelExperts | None:
    """Return one rank's experts, as far as config.json describes them.

    None if it names no expert width.
    """
    model, parallel, width = config.model_config, config.parallel_config, expert_width(config)
    if width is None:
        return None
    text, experts = model.hf_text_config, model.get_num_experts()
    if not parallel.enable_eplb:
        experts = -(-experts // expert_ranks(parallel))
    hidden = next((size for name in EXPERT_INPUTS if (size := getattr(text, name, None))), model.get_hidden_size())
    gated = has_gate(getattr(text, "model_type", ""))
    top_k = next((count for name in TOP_K if isinstance(count := getattr(text, name, None), int)), 1)
    ours, reader = _quantized(config)
    kept = reader.mixed and reader.keeps(options.stored_bits)

    def make(bits: int) -> ExpertFormat:
        fields = format_fields(PLAIN_READER if reader.mixed else reader, ours or {}, bits)
        return ExpertFormat(hidden, width, group_size=options.group_size, dtype=model.dtype, has_gate=gated, **fields)

    formats = stored_formats(options.stored_bits, make)
    layers = tuple(range(model.get_num_layers(parallel)))
    if not kept:
        return ModelExperts(layers, experts, top_k, formats)
    ranks = 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
    usual = kept_format(reader.usual, formats[options.high], width, ranks)
    named = {layer: layer for layer in layers if layer in reader.layers}  # the others are dense
    own = own_formats(reader, named, usual, width, ranks)
    return ModelExperts(layers, experts, top_k, {options.high: usual}, own=own)


def _quantized(config: VllmConfig) -> tuple[Any, Any]:
    """Return what a checkpoint says about its quantization.

    Returns:
        the quantization_config of a checkpoint of ours, else None, and the reader for other checkpoints.
    """
    return getattr(config.quant_config, "checkpoint", None), getattr(config.quant_config, "reader", PLAIN_READER)


def _refuse_model(config: VllmConfig) -> None:
    model = config.model_config
    if model.dtype == torch.float32:
        raise ConfigError(
            "vllm-dymoe: --dtype float32 is not supported, because packed experts have weights and scales of 16 bits; "
            "leave it out, or use --dtype bfloat16."
        )
    if model.get_num_experts() == 0:
        raise ConfigError(
            f"vllm-dymoe: vLLM finds no experts in the config.json of {model.model}; leave --quantization dymoe out "
            "for it."
        )


def _refuse_drafts(config: VllmConfig, ours: Mapping[str, Any] | None, options: Options) -> None:
    """Refuse drafts whose experts cannot join the model's slots.

    This comes before anything is loaded.

    Raises:
        ConfigError: they cannot.
    """
    _ = getattr(config.quant_config, "draft_reader", PLAIN_READER)  # raises if they cannot be read
    if ours is None or config.load_config.load_format == "dummy":
        return
    layers = getattr(config.model_config.hf_text_config, "num_hidden_layers", 0)
    if options.quantizer in LATTICES:
        why = f"quantizer {options.quantizer} needs a calibration, which does not exist for drafts"
    elif not has_drafts(local_folder(config), layers):
        why = "this checkpoint has no layers of multi-token prediction: an earlier `vllm-dymoe quantize` left them out"
    else:
        return
    raise ConfigError(
        f"vllm-dymoe: {why}; serve the checkpoint that it was made from, or leave --speculative-config out."
    )


def _refuse_data_parallel(config: VllmConfig, options: Options) -> None:
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return
    refused = {
        f"exchanges tokens through allgather and reduce-scatter, not through {parallel.all2all_backend}; leave "
        "--all2all-backend out": meets(parallel) and parallel.all2all_backend != "allgather_reducescatter",
        "does not support pipeline stages; leave --pipeline-parallel-size out": parallel.pipeline_parallel_size > 1,
        "does not support drafts with experts; leave --speculative-config out": drafted_by_experts(config),
        "mixes the tokens of several engines, but a trace is of one engine; leave trace out": options.trace is not None,
    }
    for sentence, is_on in refused.items():
        if is_on:
            raise ConfigError(f"vllm-dymoe: data parallelism {sentence}.")


def _refuse_recorded_stages(config: VllmConfig, options: Options) -> None:
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1 and options.trace is not None:
        raise ConfigError(
            "vllm-dymoe: trace records the routing of all layers, but a pipeline stage has only some of them; "
            f"leave --pipeline-parallel-size {stages} out, or use --tensor-parallel-size."
        )


def _refuse_training(config: VllmConfig, options: Options) -> None:
    parallel = config.parallel_config
    refused = {
        "a pipeline stage has only some of the layers; leave --pipeline-parallel-size out": (
            parallel.pipeline_parallel_size > 1
        ),
        "a rank has only some of a layer's experts; leave --enable-expert-parallel out": (
            parallel.enable_expert_parallel
        ),
    }
    for sentence, is_on in refused.items():
        if options.train_predictor is not None and is_on:
            raise ConfigError(f"vllm-dymoe: train_predictor needs whole layers, but {sentence}.")


def _check_memory(config: VllmConfig, experts: ModelExperts, options: Options) -> None:
    device_type = current_platform.device_type
    if not options.expert_budget.is_auto:
        workspace = workspace_bytes(experts, device_type)
        limit = limit_in_bytes(options.expert_budget, experts, options, workspace, automatic=0)
        plan_slots(experts, options, make_policy(options), limit, workspace)
    if options.host_store == "pinned":
        told = config.model_config.hf_text_config.to_dict()
        surely = replace(experts, layers=tuple(layer for layer in experts.layers if is_moe(told, layer)))
        choose_host_place(options.host_store, device_type, surely, _room(config, options))


def _room(config: VllmConfig, options: Options) -> HostRoom:
    parallel, available = config.parallel_config, available_host_memory()
    replicas = replicas_of_machine(parallel)
    return HostRoom(available, ranks_of_machine(parallel), options.host_memory, replicas=replicas)


def _add_worker_methods(config: VllmConfig) -> None:
    parallel: Any = config.parallel_config
    if not parallel.worker_extension_cls:
        parallel.worker_extension_cls = WORKER_EXTENSION
    elif parallel.worker_extension_cls != WORKER_EXTENSION:
        logger.info(
            "vllm-dymoe: worker_extension_cls is %s; unless it is derived from %s, there are no dymoe_stats and no "
            "dymoe_resize, and no counts on /metrics.",
            parallel.worker_extension_cls,
            WORKER_EXTENSION,
        )


def _ask_for_every_weight(config: VllmConfig) -> None:
    """Make vLLM refuse a checkpoint that lacks a dense weight.

    vLLM does so by itself only if nothing is quantized. A user's own ``enable_weights_track`` is kept, and loaders
    without this check are left alone.
    """
    load = config.load_config
    given = load.model_loader_extra_config
    if not isinstance(given, dict) or _TRACK in given:
        return
    asked = replace(load, model_loader_extra_config={**given, _TRACK: True})
    try:
        knows = getattr(get_model_loader(asked), _TRACK, False)
    except (TypeError, ValueError):  # an option that this loader, or this vLLM, does not have
        return
    if knows:
        load.model_loader_extra_config = asked.model_loader_extra_config


def name_every_place(model: Any) -> None:
    """Have a model report each loaded weight by all names that it goes by.

    The names are for vLLM's check of what was loaded. vLLM's models of transformers have a layer's gate and shared
    experts in two places, and the check asks for one of them. Weights in RoutedExperts are not checked, as where
    nothing is quantized: experts are counted while they are packed, and vLLM 0.32 leaves Laguna's bias of the router
    as it is.
    """
    load = model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if loaded is None:
            return None
        places: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), set()).add(name)
        routed = [(name, part) for name, part in model.named_modules() if isinstance(part, RoutedExperts)]
        asked = {f"{name}.{own}" for name, part in routed for own, _ in part.named_parameters(recurse=False)}
        return asked.union(loaded, *(names for names in places.values() if not names.isdisjoint(loaded)))

    model.load_weights = load_weights


def refuse_unsupported_features(config: VllmConfig) -> None:
    model, parallel, drafts = config.model_config, config.parallel_config, config.speculative_config
    unsupported = {
        "LoRA on the experts is not supported; name the layers that adapters may change with --lora-target-modules, "
        "for instance q_proj k_proj v_proj o_proj.": _lora_may_reach_experts(config.lora_config),
        "prefill context parallelism is not supported, because a rank cannot tell which tokens of a step are its own; "
        "leave --prefill-context-parallel-size out.": parallel.prefill_context_parallel_size > 1,
        "concurrent micro-batches are not supported, because layers must run in sequence; "
        "leave --enable-dbo and --ubatch-size out.": parallel.use_ubatching,
        # vLLM's first executor for Ray, removed in 0.33, calls the model runner from its graphs.
        "Ray's compiled graphs do not call the worker, so the beginning of a step would not be known; set "
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or use --distributed-executor-backend mp.": (
            parallel.distributed_executor_backend == "ray"
            and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
        ),
        "adaptive verification of drafts is not supported, because it leaves out tokens that were scheduled; set "
        '"enable_adaptive_verification": false in --speculative-config.': (
            getattr(drafts, "enable_adaptive_verification", False)
        ),
        # Multi-token prediction is in the checkpoint itself.
        "a separate speculative draft model with experts is not supported; use a dense draft "
        "model, the model's own multi-token prediction (method mtp), or the method ngram in --speculative-config.": (
            drafted_by_experts(config)
            and (drafts.method != "mtp" or str(drafts.draft_model_config.model) != str(model.model))
        ),
        "weight transfer is not supported, because the experts are packed in a store; leave --weight-transfer-config "
        "out.": getattr(config, "weight_transfer_config", None) is not None,
    }
    for sentence, is_on in unsupported.items():
        if is_on:
            raise ConfigError(f"vllm-dymoe: {sentence}")


def _lora_may_reach_experts(lora: LoRAConfig | None) -> bool:
    """Return whether LoRA may reach experts.

    vLLM wraps every layer unless target modules exclude it.
    """
    return lora is not None and (lora.target_modules is None or any(map(_of_experts, lora.target_modules)))


def _of_experts(module: str) -> bool:
    # "experts" stands for the whole layer, "experts.3.up_proj" for one of its projections.
    return "experts" in module.split(".")
