"""What ``--quantization dymoe`` means under a vLLM that we do not support: a refusal."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


def refusing_config(problem: str) -> type[QuantizationConfig]:
    """A quantization config that raises ``RuntimeError(problem)`` as soon as it is used."""

    class RefusingConfig(QuantizationConfig):
        def __init__(self) -> None:
            raise RuntimeError(problem)

        def get_name(self) -> str:
            return "dymoe"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "RefusingConfig":
            return cls()

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
            return None

    return RefusingConfig
