"""What the checkpoint says: which options it fixes, and who runs its dense layers if another tool quantized it."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.fit import check_fits, store_group_sizes
from vllm_dymoe.quantize.tensors import CheckpointError


def dense_config(config: Mapping[str, Any]) -> QuantizationConfig:
    """vLLM's own configuration of a quantized checkpoint, which runs every layer but the experts.

    Args:
        config: quantization_config of the checkpoint.

    Raises:
        ConfigError: vLLM does not run such layers.
    """
    method = str(config["quant_method"])
    try:
        return get_quantization_config(method).from_config(dict(config))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"vllm-dymoe: this vLLM cannot run the dense layers of the {method} checkpoint ({reason}); use a "
            "checkpoint that `vllm serve` opens without --quantization dymoe."
        ) from error


def expert_width(config: VllmConfig) -> int | None:
    """Width of one expert on one rank, as config.json says; None where it names none."""
    text = config.model_config.hf_text_config
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    if not isinstance(width, int):
        return None
    return (
        width if config.parallel_config.enable_expert_parallel else width // config.parallel_config.tensor_parallel_size
    )


def source_options(config: VllmConfig, reader: Reader) -> dict[str, Any]:
    """What a checkpoint fixes unless the user says otherwise."""
    sizes = store_group_sizes(reader, *_cut(config))
    return {"hi": reader.bits, **({"group_size": sizes[0]} if sizes else {})}


def check_source(config: VllmConfig, options: Options, reader: Reader) -> None:
    """Refuse options under which the checkpoint's numbers could not be taken as they are.

    Raises:
        ConfigError: they are such options.
    """
    try:
        check_fits(reader, options.stored_bits, options.group_size, *_cut(config))
    except CheckpointError as error:
        raise ConfigError(f"vllm-dymoe: {error}") from error


def read_options(
    vllm_config: VllmConfig, checkpoint: Mapping[str, Any] | None, reader: Reader | None = None
) -> Options:
    """The options of an engine.

    Args:
        vllm_config: vLLM's configuration of it.
        checkpoint: quantization_config of the checkpoint, if it is ours.
        reader: of the checkpoint's experts, if another tool has quantized them.

    Raises:
        ConfigError: they are wrong, or contradict the checkpoint.
    """
    additional = vllm_config.additional_config
    asked = additional.get("dymoe") if isinstance(additional, Mapping) else None
    if reader is not None:
        options = Options.load(asked, source_options(vllm_config, reader))
        check_source(vllm_config, options, reader)
        return options
    options = Options.load(asked, checkpoint)
    if checkpoint is not None:
        for option in ("hi", "lo", "group_size", "quantizer"):
            stored, wanted = checkpoint.get(option), getattr(options, option)
            if stored is not None and stored != wanted:
                raise ConfigError(
                    f"vllm-dymoe: {option} = {wanted} was asked for, but this checkpoint was written with "
                    f"{option} = {stored}; leave the option out, or write the checkpoint again with "
                    "`vllm-dymoe quantize`."
                )
    elif options.quantizer == "gptq":
        raise ConfigError(
            'vllm-dymoe: quantizer "gptq" needs a calibration, which there is none of while a model loads; write a '
            "checkpoint with `vllm-dymoe quantize --quantizer gptq --calibration FOLDER` and serve that."
        )
    return options


def _cut(config: VllmConfig) -> tuple[int, int]:
    """Width of an expert on one rank, and how many ranks share one; the packer checks what config.json does not say."""
    parallel = config.parallel_config
    return expert_width(config) or 0, 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
