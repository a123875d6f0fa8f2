"""What the checkpoint says: which options it fixes, and who runs its dense layers if another tool quantized it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.readers.compatibility import check_compatible, store_group_sizes
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.resolve import resolve_options


@dataclass(frozen=True)
class DenseLayers:
    """How the layers of a quantized checkpoint run that are no experts.

    Attributes:
        config: vLLM's own configuration of the checkpoint.
        refusal: why no dense layer may be quantized; None if they may.
    """

    config: QuantizationConfig
    refusal: str | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "DenseLayers":
        """Ask vLLM what it makes of a checkpoint.

        vLLM 0.32 and newer refuse checkpoints whose columns are ordered before they look which layers are quantized.
        Where only experts are, nothing of that order concerns vLLM: it gets the configuration without it.

        Args:
            config: quantization_config of the checkpoint.

        Raises:
            ConfigError: vLLM does not run such layers.
        """
        method = str(config["quant_method"])
        make = get_quantization_config(method).from_config
        try:
            return cls(make(dict(config)))
        except ValueError as error:
            refusal = (
                f"vllm-dymoe: this vLLM cannot run the dense layers of the {method} checkpoint "
                f"({str(error).rstrip('.')}); use a checkpoint that `vllm serve` opens without --quantization dymoe"
            )
            if (unordered := _without_order(config)) == config:
                raise ConfigError(f"{refusal}.") from error
            try:
                return cls(make(unordered), f"{refusal}, or one whose dense layers have 16 bits.")
            except ValueError:
                raise ConfigError(f"{refusal}.") from error

    def method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of one layer.

        Raises:
            ConfigError: it would run as if its columns had no order.
        """
        method = self.config.get_quant_method(layer, prefix)
        unquantized = method is None or isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        # What attention asks for is the scales of its cache.
        if self.refusal is not None and isinstance(layer, (LinearBase, ParallelLMHead)) and not unquantized:
            raise ConfigError(self.refusal)
        return method


def _without_order(config: Mapping[str, Any]) -> dict[str, Any]:
    """A quantization_config as it would be if columns had been quantized as they come."""
    groups = {
        name: {**group, "weights": {**(group.get("weights") or {}), "actorder": None}}
        for name, group in (config.get("config_groups") or {}).items()
        if (group.get("weights") or {}).get("actorder")
    }
    return {
        **config,
        **({"desc_act": False} if config.get("desc_act") else {}),
        **({"config_groups": {**config["config_groups"], **groups}} if groups else {}),
    }


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
        check_compatible(reader, options.stored_bits, options.group_size, *_cut(config))
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
        options = resolve_options(asked, source_options(vllm_config, reader))
        check_source(vllm_config, options, reader)
        return options
    options = resolve_options(asked, checkpoint)
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
