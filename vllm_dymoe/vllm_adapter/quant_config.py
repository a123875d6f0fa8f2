"""``--quantization dymoe``: vLLM asks this config for the method of every layer."""

import re
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_dymoe.config import ConfigError
from vllm_dymoe.quantize.readers import METHODS, Reader, make_reader
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.vllm_adapter.rank_model import RankModel
from vllm_dymoe.vllm_adapter.source import DenseLayers

_DENSE_G_IDX = re.compile(r"^(?!.*\.experts\.).*\.g_idx$")


class DymoeConfig(QuantizationConfig):
    """Gives MoE layers our method, and leaves every other layer as the checkpoint has it.

    Args:
        checkpoint: the checkpoint's quantization_config; None for a checkpoint that is not ours.
        reader: of the experts of a checkpoint that another tool has quantized; None for all others.
        dense: how the layers run that are no experts; None where they have 16 bits.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any] | None = None,
        reader: Reader | None = None,
        dense: DenseLayers | None = None,
    ) -> None:
        self._layers = dense
        self._dense = None if dense is None else dense.config
        super().__init__()
        self.checkpoint = checkpoint
        self.reader = reader
        # Made in the process that holds the weights, when the first MoE layer is created.
        self.model: RankModel | None = None

    def get_name(self) -> str:
        """The name behind ``--quantization``."""
        return "dymoe"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations, scales and 16-bit experts."""
        dtypes = [torch.bfloat16, torch.float16]
        if self._dense is None:
            return dtypes
        return [dtype for dtype in dtypes if dtype in self._dense.get_supported_act_dtypes()]

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
        """Read the quantization_config of a checkpoint, written by ``vllm-dymoe quantize`` or by another tool.

        Raises:
            ConfigError: it is a variant that cannot be read, or whose dense layers this vLLM cannot run.
        """
        if config.get("quant_method") == "dymoe":
            dense = config.get("dense")
            return cls(dict(config), dense=None if dense is None else DenseLayers.read(dense))
        try:
            reader = make_reader(config)
        except CheckpointError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error
        return cls(reader=reader, dense=DenseLayers.read(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Our name for a checkpoint whose experts we read, if the user asks for us; vLLM asks before it compares.

        Raises:
            ConfigError: ``--quantization dymoe`` for a checkpoint that is quantized otherwise.
        """
        if user_quant != "dymoe" or hf_quant_cfg.get("quant_method") == "dymoe":
            return None
        if hf_quant_cfg.get("quant_method") not in METHODS:
            try:
                make_reader(hf_quant_cfg)
            except CheckpointError as error:
                raise ConfigError(f"vllm-dymoe: {error}") from error
        return "dymoe"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Our method for a MoE layer; for any other the checkpoint's own, else the unquantized one.

        Raises:
            ConfigError: the layer is quantized in a way that this vLLM does not run.
        """
        from vllm_dymoe.vllm_adapter.moe_method import DymoeMoEMethod

        if isinstance(layer, RoutedExperts):
            if self.model is None:
                self.model = RankModel(get_current_vllm_config(), self.checkpoint, self.reader)
            return DymoeMoEMethod(layer.moe_config, self.model)
        if self._layers is not None:
            return self._layers.method(layer, prefix)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    # -- what vLLM tells a config, for the one of the dense layers ---------------------------------

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """Which layers vLLM has joined; models set and extend it."""
        return self._packed if self._dense is None else self._dense.packed_modules_mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self._packed = mapping
        if self._dense is not None:
            self._dense.packed_modules_mapping = mapping

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers that the checkpoint's configuration names."""
        if self._dense is not None:
            self._dense.apply_vllm_mapper(hf_to_vllm_mapper)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        """Let the dense configuration look at the checkpoint's files."""
        if self._dense is not None:
            self._dense.maybe_update_config(*args, **kwargs)

    def get_cache_scale_mapper(self) -> Any:
        """Names of KV-cache scales."""
        return super().get_cache_scale_mapper() if self._dense is None else self._dense.get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """Tensors that vLLM (0.32 and newer) leaves out: g_idx, but not that of experts, whose reader looks at it."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={_DENSE_G_IDX: None})

    def loaded_model(self) -> RankModel:
        """The model of this rank.

        Raises:
            ConfigError: the model has no MoE layers on this rank.
        """
        if self.model is None:
            raise ConfigError("vllm-dymoe: this model has no MoE layers, so there is nothing to serve with dymoe.")
        return self.model
