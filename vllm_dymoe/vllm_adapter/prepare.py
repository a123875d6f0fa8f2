"""What is checked and set in the user's process, after vLLM has made its configuration."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.experts.layout import ExpertFormat, ModelExperts
from vllm_dymoe.host_memory import available_host_memory
from vllm_dymoe.predict.checkpoint import PredictorError, read_card
from vllm_dymoe.quantize.tensors import CheckpointError, check_files
from vllm_dymoe.runtime.sizing import limit_in_bytes, plan_slots, workspace_bytes
from vllm_dymoe.store import MANIFEST, Manifest, StoreError
from vllm_dymoe.store.placement import choose_host_place
from vllm_dymoe.systems import make_system
from vllm_dymoe.vllm_adapter.features import refuse_unsupported_features
from vllm_dymoe.vllm_adapter.graphs import settle_graphs
from vllm_dymoe.vllm_adapter.log import logger
from vllm_dymoe.vllm_adapter.source import expert_width, read_options

WORKER_EXTENSION = "vllm_dymoe.vllm_adapter.worker.DymoeWorkerExtension"


def prepare(config: VllmConfig) -> None:
    """Refuse what cannot work, keep host decisions out of CUDA graphs, and add the worker methods.

    Raises:
        ConfigError: an option, a combination or the budget cannot work.
    """
    options = read_options(
        config, getattr(config.quant_config, "checkpoint", None), getattr(config.quant_config, "reader", None)
    )
    if config.model_config.get_num_experts() == 0:
        raise ConfigError(
            f"vllm-dymoe: {config.model_config.model} is not a Mixture-of-Experts model; "
            "leave --quantization dymoe out for it."
        )
    _refuse_broken_model(config)
    refuse_unsupported_features(config)
    _check_ranks(config)
    _check_depth(config, options)
    _check_trace(config, options)
    _check_budget(config, options)
    _check_host_memory(config, options)
    _check_predictor(options)
    _check_weights(config)
    if current_platform.support_static_graph_mode():
        settle_graphs(config)
    _add_worker_methods(config)


def refuse_idle_options(config: VllmConfig) -> None:
    """Refuse our options where the plugin is not in use: a model that was to be offloaded would not be.

    Raises:
        ConfigError: there are some.
    """
    additional = config.additional_config
    if isinstance(additional, Mapping) and "dymoe" in additional:
        raise ConfigError(
            "vllm-dymoe: additional_config.dymoe is set, but the model is not served with dymoe; "
            "add --quantization dymoe, or leave additional_config.dymoe out."
        )


def _refuse_broken_model(config: VllmConfig) -> None:
    """Refuse what vLLM itself cannot run, where that is known and there is a way out.

    Raises:
        ConfigError: it is such a model.
    """
    if "PhimoeForCausalLM" in config.model_config.architectures:
        raise ConfigError(
            "vllm-dymoe: vLLM runs PhimoeForCausalLM with transformers' code, which fails in its router; for vLLM's "
            'own model, which works, write "PhiMoEForCausalLM" into architectures in the config.json of '
            f"{config.model_config.model}."
        )


def _check_ranks(config: VllmConfig) -> None:
    """Refuse a packed checkpoint for other ranks than those it will have; the workers check again.

    Raises:
        ConfigError: its experts are cut for another number of ranks.
    """
    folder = Path(config.model_config.model)
    packed = getattr(config.quant_config, "checkpoint", None) is not None and (folder / MANIFEST).is_file()
    if not packed or config.load_config.load_format == "dummy":
        return
    try:
        _, packed_for = Manifest.read(folder).tensor_parallel
    except StoreError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error
    ranks = config.parallel_config.tensor_parallel_size
    if ranks != packed_for:
        raise ConfigError(
            f"vllm-dymoe: the experts in {folder} are packed for --tensor-parallel-size {packed_for}, not {ranks}; "
            "serve them with that, or serve the 16-bit checkpoint that they were made from."
        )


def _check_depth(config: VllmConfig, options: Options) -> None:
    """Refuse a system that goes by depth where no process has all layers.

    Raises:
        ConfigError: it is so.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1 and make_system(options).heavy_hitters is not None:
        raise ConfigError(
            f'vllm-dymoe: system "{options.system}" goes by the depth of a layer, which a stage of a pipeline does not '
            f"know; leave --pipeline-parallel-size {stages} out, or use --tensor-parallel-size."
        )


def _check_trace(config: VllmConfig, options: Options) -> None:
    """Refuse to record where no process has all layers.

    Raises:
        ConfigError: it is so.
    """
    stages = config.parallel_config.pipeline_parallel_size
    if options.trace is not None and stages > 1:
        raise ConfigError(
            "vllm-dymoe: trace records what all layers choose, and a stage of a pipeline has only some of them; "
            f"leave --pipeline-parallel-size {stages} out, or use --tensor-parallel-size."
        )


def _check_budget(config: VllmConfig, options: Options) -> None:
    """Refuse a hopeless budget before any process starts; the worker checks again with the real layers.

    Raises:
        ConfigError: not even one expert of each tier fits.
    """
    experts = experts_of(config, options)
    if experts is None or options.expert_budget.is_auto:
        return
    workspace = workspace_bytes(experts, current_platform.device_type)
    limit = limit_in_bytes(options.expert_budget, experts, options, workspace, automatic=0)
    plan_slots(experts, options, make_system(options), limit, workspace)


def _check_host_memory(config: VllmConfig, options: Options) -> None:
    """Refuse memory that the machine clearly has not, before hours of quantizing; the workers check with all layers.

    Raises:
        ConfigError: the experts do not fit.
    """
    experts = experts_of(config, options)
    if experts is None or options.host_store != "pinned":
        return
    surely = replace(experts, layers=experts.layers[: _layers_with_experts(config, len(experts.layers))])
    ranks = config.parallel_config.local_world_size
    try:
        choose_host_place(options.host_store, current_platform.device_type, surely, available_host_memory(), ranks)
    except StoreError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error


def _layers_with_experts(config: VllmConfig, layers: int) -> int:
    """How many of so many layers have experts, as far as config.json says which have none."""
    text = config.model_config.hf_text_config
    dense = sum(int(getattr(text, name, None) or 0) for name in ("first_k_dense_replace", "num_dense_layers"))
    dense += len(getattr(text, "mlp_only_layers", None) or ())
    names = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
    steps = (getattr(text, name, None) for name in names)
    step = max((step for step in steps if isinstance(step, int)), default=1)
    return max(0, layers - dense) // max(1, step)


def _check_predictor(options: Options) -> None:
    """Refuse a file that is no predictor before any process starts; the worker checks that it is this model's.

    Raises:
        ConfigError: it cannot be read.
    """
    if options.predictor is None:
        return
    try:
        read_card(options.predictor)
    except PredictorError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error


def experts_of(config: VllmConfig, options: Options) -> ModelExperts | None:
    """The experts of one rank as far as the model's config.json tells; None where it names no expert width."""
    model = config.model_config
    text = model.hf_text_config
    width = expert_width(config)
    if width is None:
        return None
    parallel = config.parallel_config
    experts = model.get_num_experts()
    if parallel.enable_expert_parallel:
        experts = -(-experts // parallel.tensor_parallel_size)
    formats = {
        bits: ExpertFormat(model.get_hidden_size(), width, bits, options.group_size, model.dtype)
        for bits in options.stored_bits
    }
    layers = tuple(range(model.get_num_layers(parallel)))
    return ModelExperts(layers, experts, getattr(text, "num_experts_per_tok", None) or 1, formats)


def _check_weights(config: VllmConfig) -> None:
    """Refuse a local checkpoint whose files are cut off before hours of loading it; what was downloaded is whole.

    Raises:
        ConfigError: a file is missing, or shorter than its header says.
    """
    folder = Path(config.model_config.model)
    if folder.is_dir() and config.load_config.load_format in ("auto", "hf", "safetensors"):
        try:
            check_files(folder)
        except CheckpointError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error


def _add_worker_methods(config: VllmConfig) -> None:
    parallel: Any = config.parallel_config
    if not parallel.worker_extension_cls:
        parallel.worker_extension_cls = WORKER_EXTENSION
    elif parallel.worker_extension_cls != WORKER_EXTENSION:
        logger.info(
            "vllm-dymoe: worker_extension_cls is %s, so dymoe_stats and dymoe_resize are not there; "
            "derive your class from %s to have both.",
            parallel.worker_extension_cls,
            WORKER_EXTENSION,
        )
