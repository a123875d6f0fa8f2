"""``--quantization dymoe``: vLLM asks this config for the method of every layer."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_dymoe.config import ConfigError
from vllm_dymoe.vllm_adapter.rank_model import RankModel


class DymoeConfig(QuantizationConfig):
    """Gives MoE layers our method, and leaves every other layer as the checkpoint has it.

    Args:
        checkpoint: the checkpoint's quantization_config; None for a checkpoint that is not ours.
    """

    def __init__(self, checkpoint: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        # Made in the process that holds the weights, when the first MoE layer is created.
        self.model: RankModel | None = None

    def get_name(self) -> str:
        """The name behind ``--quantization``."""
        return "dymoe"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations, scales and 16-bit experts."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere: the first with bfloat16."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file besides config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DymoeConfig":
        """Read the quantization_config of a checkpoint written by ``vllm-dymoe quantize``."""
        return cls(dict(config))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> None:
        """Never another method than the checkpoint's; vLLM asks before it compares the two.

        Raises:
            ConfigError: ``--quantization dymoe`` for a checkpoint that is quantized otherwise.
        """
        method = hf_quant_cfg.get("quant_method", "a method it does not name")
        if user_quant == "dymoe" and method != "dymoe":
            raise ConfigError(
                f"vllm-dymoe: this checkpoint is quantized with {method} already, and --quantization dymoe takes only "
                "checkpoints with 16-bit weights; serve one of those (transformers writes it from most quantized ones: "
                "from_pretrained with dequantize=True in its quantization config, then save_pretrained), or leave "
                "--quantization dymoe out."
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Our method for a MoE layer, the unquantized one for a linear layer, else None."""
        from vllm_dymoe.vllm_adapter.moe_method import DymoeMoEMethod

        if isinstance(layer, RoutedExperts):
            if self.model is None:
                self.model = RankModel(get_current_vllm_config(), self.checkpoint)
            return DymoeMoEMethod(layer.moe_config, self.model)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    def loaded_model(self) -> RankModel:
        """The model of this rank.

        Raises:
            ConfigError: the model has no MoE layers on this rank.
        """
        if self.model is None:
            raise ConfigError("vllm-dymoe: this model has no MoE layers, so there is nothing to serve with dymoe.")
        return self.model
