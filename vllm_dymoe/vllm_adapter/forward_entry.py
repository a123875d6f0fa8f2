"""How vLLM's runner of a MoE layer enters it where CUDA graphs stand around the layer: through output buffers.

A graph replays with the addresses of its capture, and copies nothing. vLLM's own operator, ``vllm::moe_forward``,
returns fresh tensors, so a graph behind it would read the tensors of its capture again, step after step. Here the
caller allocates the outputs, which makes them a part of the graph before the layer and fixes their addresses; the
operator runs between graphs, on the host, and writes into them. ``vllm::unified_attention_with_output`` does the same
for attention. The price is a copy of the layer's output.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture, is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import (
    _moe_forward_fake,
    _moe_forward_shared_fake,
    _resolve_layer_name,
    get_layer_from_name,
)
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

from vllm_dymoe.config import ConfigError
from vllm_dymoe.vllm_adapter.moe_method import DymoeMoEMethod


def entry_with_buffers(runner: Any) -> Callable[..., Any] | None:
    """What a MoERunner calls in place of vLLM's operator; None for another layer than ours, and without graphs.

    Raises:
        ConfigError: vLLM interrupts captures, but did not when this module was imported.
    """
    if not isinstance(runner.routed_experts.quant_method, DymoeMoEMethod):
        return None
    if get_current_vllm_config().compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return None
    if is_breakable_cudagraph_enabled() and not hasattr(_interrupting, "__wrapped__"):
        raise ConfigError(
            "vllm-dymoe: vLLM turned breakable CUDA graphs on after this process had loaded a model without them; "
            "start the engine in a process of its own, or set VLLM_USE_BREAKABLE_CUDAGRAPH=1 for both."
        )
    return _routed if runner.shared_experts is None else _routed_and_shared


def _routed(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: LayerNameType,
    hidden_dim_unpadded: int,
) -> torch.Tensor:
    """As ``vllm::moe_forward``: hidden_states [tokens, hidden] -> [tokens, hidden]."""
    arguments = (hidden_states, router_logits, shared_experts_input, input_ids)
    out = _moe_forward_fake(*arguments, layer_name, hidden_dim_unpadded)  # vLLM's rule for the shape of the output
    torch.ops.vllm_dymoe.moe_forward_into(*arguments, out, None, layer_name)
    return out


def _routed_and_shared(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: LayerNameType,
    hidden_dim_unpadded: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``vllm::moe_forward_shared``: the shared experts' output and the routed experts' output."""
    arguments = (hidden_states, router_logits, shared_experts_input, input_ids)
    shared_out, out = _moe_forward_shared_fake(*arguments, layer_name, hidden_dim_unpadded)
    torch.ops.vllm_dymoe.moe_forward_into(*arguments, out, shared_out, layer_name)
    return shared_out, out


def _moe_forward_into(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    out: torch.Tensor,
    shared_out: torch.Tensor | None,
    layer_name: LayerNameType,
) -> None:
    runner: Any = get_layer_from_name(_resolve_layer_name(layer_name))
    result = runner._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)
    if shared_out is None:
        out.copy_(result)
    else:
        shared, routed = result
        shared_out.copy_(shared)
        out.copy_(routed)


# Where vLLM has breakable graphs, the operator ends the running capture, and begins another one behind it.
_interrupting = eager_break_during_capture(_moe_forward_into)
_library = torch.library.Library("vllm_dymoe", "FRAGMENT")
direct_register_custom_op("moe_forward_into", _interrupting, mutates_args=["out", "shared_out"], target_lib=_library)
