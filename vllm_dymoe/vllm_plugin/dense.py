"""The option ``dense``: layers other than experts, quantized as they load.

They are a 16-bit checkpoint's attention, shared experts and LM head. With experts at 4 bits, these layers are most of
what a token reads. On a CPU the native library multiplies them, on a GPU vLLM's FP8 kernels (:mod:`~.dense_fp8`).
Routers keep 16 bits, and so do layers whose weights a model reads itself and encoders of pictures and sounds, which
decoding does not read.
"""

import re
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.linear import Linear
from vllm_dymoe.options import CALIBRATED, ConfigError, Options
from vllm_dymoe.quantize import QUANTIZERS, quantize_matrix
from vllm_dymoe.vllm_plugin.dense_fp8 import Fp8HeadMethod, linear_method, online_fp8

# Layers that models only call; a router's gate, a convolution or MLA's kv_b_proj is not among them.
_PACKED = re.compile(
    r"(.*\.)?([qkv]_proj|qkv_proj|qkv|query_key_value|Wqkv|o_proj|out_proj|dense|gate_up_proj|gate_proj|up_proj|down_proj|"
    r"w1|w2|w3|w13|q_[ab]_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|in_proj_qkvz?)"
)
_ENCODERS = re.compile(r"(.*\.)?\w*(visual|vision|vit|image|video|audio|multi_?modal|mm_projector|resampler)\w*\..*")


def packed_method(
    layer: torch.nn.Module, prefix: str, options: Options, config: VllmConfig
) -> QuantizeMethodBase | None:
    """Return the method of a layer that is to be quantized.

    None for a layer that keeps its 16 bits.
    """
    if options.dense == 16:
        return None
    on_cpu = current_platform.is_cpu()
    if isinstance(layer, LinearBase) and _PACKED.fullmatch(prefix) and not _ENCODERS.fullmatch(prefix):
        return PackedLinearMethod(options) if on_cpu else linear_method()
    model = config.model_config
    if isinstance(layer, ParallelLMHead) and getattr(model, "head_dtype", model.dtype) in (None, model.dtype):
        tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        if on_cpu:
            return PackedHeadMethod(options, tied=tied)
        return None if tied else Fp8HeadMethod()  # a second copy of a tied head would cost more memory than it saves
    return None


def check_dense(options: Options, *, quantized: bool) -> None:
    """Check that the option ``dense`` is possible here.

    Raises:
        ConfigError: it is not, because layers are quantized already, bits are unsupported, or kernels are missing.
    """
    if options.dense == 16:
        return
    why = None
    if quantized:
        why = "the checkpoint's dense layers have been quantized already; leave the option out"
    elif not current_platform.is_cpu():
        if options.dense != 8:
            why = "a GPU has kernels for 8 bits (FP8); set dense to 8, or leave it out"
        elif online_fp8() is None:
            why = "this vLLM cannot quantize to FP8 while it loads; install a newer one, or leave the option out"
    elif native.load() is None:
        why = "the native library was not built; install vllm-dymoe again with a C++ compiler, or leave the option out"
    if why is not None:
        raise ConfigError(f"vllm-dymoe: dense = {options.dense} is impossible here, because {why}.")


def map_packed(layer: Any, fmt: MatrixFormat) -> torch.Tensor:
    """Give a layer the attribute ``packed``, uint8, and return it.

    :func:`multiply` reads it; the caller fills it.
    """
    layer.packed = map_bytes(fmt.nbytes)
    layer.linear = Linear(fmt.view(layer.packed))
    layer.packed_rows = fmt.rows
    return layer.packed


def multiply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x times a layer's packed matrix, plus its bias.

    Maps x [..., columns] to [..., rows].
    """
    out = torch.ops.vllm_dymoe.linear(x, layer.packed, layer.packed_rows)
    return out if bias is None else out + bias


class _Packed:
    """A layer that is packed after loading.

    An LM head that is ``tied`` to the embedding also keeps its 16 bits.
    """

    def __init__(self, options: Options, *, tied: bool = False) -> None:
        super().__init__()
        self._options, self._tied = options, tied

    def process_weights_after_loading(self, layer: Any) -> None:
        weight: torch.Tensor = layer.weight.data
        rows, columns = weight.shape
        options = self._options
        fmt = MatrixFormat(rows, columns, encoding_of(options.dense), options.group_size, weight.dtype)
        quantizer = QUANTIZERS["rtn" if options.quantizer in CALIBRATED else options.quantizer]
        quantize_matrix(weight, fmt, quantizer, map_packed(layer, fmt))
        if not self._tied:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., columns] to [..., rows]."""
        return multiply(layer, x, bias)


class PackedLinearMethod(_Packed, UnquantizedLinearMethod):
    """The method of a packed linear layer."""


class PackedHeadMethod(_Packed, UnquantizedEmbeddingMethod):
    """The method of a packed LM head."""
