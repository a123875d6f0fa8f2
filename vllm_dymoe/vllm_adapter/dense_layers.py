"""The layers of a quantized checkpoint that are no experts: vLLM's own methods, and what is said where it has none."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.readers import EXPERT_DTYPE, describe_modelopt


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
        make = get_quantization_config(_name_in_vllm(config)).from_config
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
        method = self._method_of_vllm(layer, prefix)
        unquantized = method is None or isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
        # What attention asks for is the scales of its cache.
        if self.refusal is not None and isinstance(layer, (LinearBase, ParallelLMHead)) and not unquantized:
            raise ConfigError(self.refusal)
        return method

    def _method_of_vllm(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's method, whose failures to run a linear layer on this machine are a sentence.

        Raises:
            ConfigError: it does not run it.
        """
        if not isinstance(layer, LinearBase):
            return self.config.get_quant_method(layer, prefix)
        with _limit_of_vllm(prefix):
            method = self.config.get_quant_method(layer, prefix)
        if method is None or isinstance(method, UnquantizedLinearMethod):
            return method
        create, process = method.create_weights, method.process_weights_after_loading

        def create_weights(*args: Any, **kwargs: Any) -> Any:
            with _limit_of_vllm(prefix):
                return create(*args, **kwargs)

        def process_weights_after_loading(layer: Any) -> None:
            with _limit_of_vllm(prefix):
                process(layer)
                if current_platform.is_cpu():  # whose build lacks operators, which show when they are called
                    width = getattr(layer, "input_size_per_partition", layer.input_size)
                    method.apply(layer, torch.zeros(1, width, dtype=layer.params_dtype))

        # Of this layer's own method, and of nothing else in vLLM.
        vars(method).update(create_weights=create_weights, process_weights_after_loading=process_weights_after_loading)
        return method


@contextlib.contextmanager
def _limit_of_vllm(prefix: str) -> Iterator[None]:
    """Errors of vLLM's own method of a dense layer, told as what they are.

    Raises:
        ConfigError: there was one.
    """
    try:
        yield
    except Exception as error:  # of any kind: its CPU build lacks operators and placeholders stand for kernels
        said = (str(error).strip() or repr(error)).splitlines()[0].rstrip(". ")
        raise ConfigError(
            f"vllm-dymoe: vLLM itself cannot run the quantized dense layer {prefix} of this checkpoint on this machine "
            f"({said}); use a GPU that vLLM names for it, or a checkpoint whose dense layers have 16 bits."
        ) from error


def _name_in_vllm(config: Mapping[str, Any]) -> str:
    """The method that vLLM makes of a quantization_config; ModelOpt's algorithms are several of them."""
    if EXPERT_DTYPE in config:
        return "deepseek_v4_fp8"
    if config.get("quant_method") == "auto-round":
        return "inc"
    algorithm = str(describe_modelopt(config).get("quant_algo") or "").upper()
    names = {"NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8", "MIXED": "modelopt_mixed", "FP8": "modelopt"}
    return next((name for part, name in names.items() if part in algorithm), str(config["quant_method"]))


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
