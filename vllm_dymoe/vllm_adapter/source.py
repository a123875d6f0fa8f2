"""A checkpoint that another tool has quantized: which options it fixes, and who runs its dense layers."""

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


def _cut(config: VllmConfig) -> tuple[int, int]:
    """Width of an expert on one rank, and how many ranks share one; the packer checks what config.json does not say."""
    parallel = config.parallel_config
    return expert_width(config) or 0, 1 if parallel.enable_expert_parallel else parallel.tensor_parallel_size
