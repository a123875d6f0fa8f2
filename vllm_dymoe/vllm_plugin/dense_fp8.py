"""The option ``dense`` on a GPU: vLLM's own online FP8.

It is used for the layers that :mod:`~.dense` packs on a CPU. From compute capability 8.9 on, a card multiplies FP8 by
FP8, with a scale for each output and each token. An older card stores weights in FP8, with one scale for a matrix, and
multiplies at 16 bits (Marlin).
"""

from types import ModuleType
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

_MULTIPLIES_FP8 = 89  # compute capability


def online_fp8() -> ModuleType | None:
    """Return vLLM's module of online FP8 methods; None if this vLLM has none."""
    try:
        from vllm.model_executor.layers.quantization.online import fp8
    except ImportError:
        return None
    return fp8


def linear_method() -> QuantizeMethodBase:
    """Return the method of a linear layer.

    It quantizes each weight as soon as that is loaded.
    """
    module = online_fp8()
    assert module is not None, "check_dense has refused it"
    whole: type[QuantizeMethodBase] = module.Fp8PerTensorOnlineLinearMethod
    if current_platform.has_device_capability(_MULTIPLIES_FP8):
        return getattr(module, "Fp8PtpcOnlineLinearMethod", whole)()
    return whole()


class Fp8HeadMethod(UnquantizedEmbeddingMethod):
    """The method of an LM head, which is loaded at 16 bits.

    It is then passed to a linear layer's method, because vLLM has none for heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._method: Any = linear_method()  # made in the context in which vLLM makes layers, whose dtype it takes
        self._linear: Any = torch.nn.Module()

    def process_weights_after_loading(self, layer: Any) -> None:
        weight: torch.Tensor = layer.weight.data
        rows, columns = weight.shape
        linear = self._linear
        linear.tp_size, linear.input_size, linear.output_size = 1, columns, rows  # scales are for this rank's rows
        self._method.create_weights(linear, columns, [rows], columns, rows, weight.dtype, weight_loader=_no_loader)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._method.process_weights_after_loading(linear)
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., columns] to [..., rows]."""
        out: torch.Tensor = self._method.apply(self._linear, x, bias)
        return out


def _no_loader(parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
    raise AssertionError("the weight is loaded already")
