"""vLLM's seam for one MoE layer: create (almost) no weights, take the checkpoint's, run ours."""

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_dymoe.config import ConfigError
from vllm_dymoe.kernels import Activation
from vllm_dymoe.vllm_adapter.expert_loader import ExpertLoader
from vllm_dymoe.vllm_adapter.graphs import refuse_capture
from vllm_dymoe.vllm_adapter.prequantized_loader import PrequantizedExpertLoader
from vllm_dymoe.vllm_adapter.rank_model import LayerSpec, RankModel

_ACTIVATIONS = {
    MoEActivation.SILU: Activation.SILU,
    MoEActivation.GELU: Activation.GELU,
    MoEActivation.GELU_TANH: Activation.GELU_TANH,
    MoEActivation.SWIGLUOAI: Activation.SWIGLU_OAI,
}


class DymoeMoEMethod(FusedMoEMethodBase):
    """One MoE layer whose experts live in the host store.

    Routing and shared experts stay vLLM's.
    """

    def __init__(self, moe: FusedMoEConfig, model: RankModel) -> None:
        super().__init__(moe)
        self.model = model
        self.position = -1

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """None: vLLM's own kernels never see our weights."""
        return None

    def create_weights(
        self,
        layer: Any,  # a RoutedExperts; torch.nn.Module hides its attributes from type checkers
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register empty placeholders that vLLM's loaders hand every expert's weights to.

        Raises:
            ConfigError: the layer needs something that is not supported.
        """
        _refuse_unsupported(layer, self.moe)
        self.position = self.model.add_layer(
            LayerSpec(
                name=layer.layer_name,
                num_experts=num_experts,
                top_k=self.moe.experts_per_token,
                hidden=hidden_size,
                intermediate=intermediate_size_per_partition,
                dtype=params_dtype,
                bias=self.moe.has_bias,
                rank=self.moe.moe_parallel_config.tp_rank,
                ranks=self.moe.moe_parallel_config.tp_size,
                expert_rank=self.moe.moe_parallel_config.ep_rank,
                expert_ranks=self.moe.moe_parallel_config.ep_size,
                activation=_ACTIVATIONS[self.moe.activation],
            )
        )
        self._activation = _ACTIVATIONS[self.moe.activation]
        self._weights_on_input = layer.apply_router_weight_on_input
        put = functools.partial(self.model.put, self.position)
        put_bias = functools.partial(self.model.put_bias, self.position)
        self._loader = ExpertLoader(layer, put, put_bias)
        if self.model.reader is not None:
            whole = intermediate_size_per_partition * self.moe.moe_parallel_config.tp_size
            wanted = self.model.wants_experts
            self._loader = PrequantizedExpertLoader(layer, put, put_bias, self.model.reader, wanted, hidden_size, whole)
        self._loader.register(layer, params_dtype, bias=self.moe.has_bias)
        # The custom operator finds its layer by name in the forward context, as vLLM's own does.
        get_current_vllm_config().compilation_config.static_forward_context[_context_key(layer.layer_name)] = self

    def process_weights_after_loading(self, layer: Any) -> None:
        """Complete the store when the last layer has been loaded."""
        # One entry more, at -1: where vLLM has chosen nobody, for rows of a captured graph that are no tokens.
        local = layer.expert_map
        self._expert_map = None if local is None else torch.cat((local, local.new_full((1,), -1)))
        if isinstance(self._loader, PrequantizedExpertLoader):
            self._loader.check_complete()
        self.model.layer_loaded(self.position, layer)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the routed experts: x [tokens, hidden] -> [tokens, hidden]."""
        if self._weights_on_input:  # one expert for each token
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return torch.ops.vllm_dymoe.moe(x, topk_weights, topk_ids, layer.layer_name)

    def run(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """What the operator does, outside of any compilation: x [rows, hidden] -> [rows, hidden].

        Rows that only fill up a captured graph's batch come out as zeros. Nothing of ours sees them, whatever vLLM has
        routed them to: to expert -1 from 0.32 on, before that to some expert.
        """
        tokens = self.model.step.real(len(x))
        if tokens == len(x):
            return self._run_tokens(x, topk_weights, topk_ids)
        out = torch.zeros_like(x)
        out[:tokens] = self._run_tokens(x[:tokens], topk_weights[:tokens], topk_ids[:tokens])
        return out

    def _run_tokens(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        if not self.model.step.warming_up:
            if self.model.recorder is not None:
                self.model.recorder.see(self.position, x, topk_weights, topk_ids)
            if self.model.trace is not None:
                self.model.trace.record(self.position, x, topk_weights, topk_ids)
        if self._expert_map is not None:
            topk_ids = self._expert_map[topk_ids.long()]
        return self.model.forward(self.position, x, topk_weights, topk_ids, self._activation)


def _refuse_unsupported(layer: Any, moe: FusedMoEConfig) -> None:
    problem = None
    if moe.activation not in _ACTIVATIONS:
        problem = f"the expert activation {moe.activation.value}"
    elif getattr(moe, "swiglu_limit", None) is not None:
        problem = "a clamped SwiGLU in the experts"
    elif layer.apply_router_weight_on_input and moe.experts_per_token != 1:
        problem = "router weights on the input of several experts for each token"
    if problem is not None:
        raise ConfigError(
            f"vllm-dymoe: {layer.layer_name} needs {problem}, which is not supported yet; "
            "serve this model without --quantization dymoe."
        )


def _context_key(layer_name: str) -> str:
    return f"{layer_name}.dymoe"


def _moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    refuse_capture(x, layer_name)
    method: DymoeMoEMethod = get_forward_context().no_compile_layers[_context_key(layer_name)]
    return method.run(x, topk_weights, topk_ids)


def _moe_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
    return torch.empty_like(x)


# Not torch.library.custom_op, whose wrappers cost as much again as the call: there is one in every layer.
_library = torch.library.Library("vllm_dymoe", "DEF")
_library.define("moe(Tensor x, Tensor topk_weights, Tensor topk_ids, str layer_name) -> Tensor")
_library.impl("moe", _moe, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_dymoe::moe", _moe_fake, lib=_library)
