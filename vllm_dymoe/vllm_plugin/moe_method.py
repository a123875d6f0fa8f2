"""vLLM's interface for one MoE layer.

It creates placeholders, takes the checkpoint's weights, and calls the rank's server.

Operators keep host code out of what vLLM compiles and captures. ``moe`` stands for the routed experts in a compiled
model. On a CPU the native library implements it (kernels/cpu/operator.h), and calls ``moe_in_python`` for what it
cannot do alone. If CUDA graphs surround the layer, ``moe_forward_into`` replaces ``vllm::moe_forward``, which returns
new tensors: the next graph would read those of its capture, step after step. Here the caller allocates the outputs,
which makes them a part of the graph before the layer; the operator runs between graphs and writes into them, as
``vllm::unified_attention_with_output`` does. The price is a copy of the layer's output.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture, is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import (
    _moe_forward_fake,
    _moe_forward_shared_fake,
    _resolve_layer_name,
    get_layer_from_name,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op

from vllm_dymoe.kernels import native
from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin.activations import activation_of
from vllm_dymoe.vllm_plugin.balance import owned
from vllm_dymoe.vllm_plugin.expert_ids import bounded_map
from vllm_dymoe.vllm_plugin.expert_loader import ExpertLoader
from vllm_dymoe.vllm_plugin.loading import Loading, layers_around
from vllm_dymoe.vllm_plugin.model_store import LayerSpec
from vllm_dymoe.vllm_plugin.sleep import past_the_pool
from vllm_dymoe.vllm_plugin.step import RankLayer


class DymoeMoEMethod(FusedMoEMethodBase):
    """One MoE layer whose experts are in the host store.

    Routing and shared experts stay vLLM's.
    """

    _loaded = _balanced = False

    def __init__(self, moe: FusedMoEConfig, loading: Loading) -> None:
        super().__init__(moe)
        self.loading = loading

    @property
    def supports_eplb(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        """Return True: data-parallel ranks exchange their rows inside ``apply``.

        Only there is it known which rows are tokens.
        """
        return True

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """Return None: vLLM's own kernels never see our weights."""
        return None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Round sizes up to whole groups per rank if vLLM's loader needs that.

        It needs that if it cuts a checkpoint by whole groups. Otherwise sizes are returned unchanged.
        """
        reader = self.loading.reader
        if reader.ranks_take_groups and reader.group_size is not None:
            groups = -(-intermediate_size_per_partition // reader.group_size)
            intermediate_size_per_partition = groups * reader.group_size
        sizes = hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        rounded: tuple[int, int] = super().maybe_roundup_sizes(*sizes)
        return rounded

    def create_weights(
        self,
        layer: Any,  # a RoutedExperts; torch.nn.Module hides its attributes from type checkers
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register empty placeholders for vLLM's weight loaders.

        Raises:
            ConfigError: the activation is not supported.
        """
        parallel, activation = self.moe.moe_parallel_config, activation_of(layer)
        weights_on_input = layer.apply_router_weight_on_input
        self._balanced = parallel.enable_eplb
        if self._balanced:  # any of them may become this rank's
            num_experts = self.moe.num_experts - self.loading.config.parallel_config.eplb_config.num_redundant_experts
        position = self.loading.add_layer(
            LayerSpec(
                name=layer.layer_name,
                num_experts=num_experts,
                top_k=self.moe.experts_per_token,
                hidden=hidden_size,
                intermediate=intermediate_size_per_partition,
                dtype=params_dtype,
                bias=self.moe.has_bias,
                rank=parallel.tp_rank,
                ranks=parallel.tp_size,
                expert_rank=0 if self._balanced else parallel.ep_rank,
                expert_ranks=1 if self._balanced else parallel.ep_size,
                activation=activation,
                weights_on_input=weights_on_input,
                all_experts=self.moe.num_experts if parallel.ep_size > 1 else 0,
                scattered=() if self._balanced else _scattered(layer.expert_map),
            )
        )
        part = get_tensor_model_parallel_rank() if parallel.is_sequence_parallel else None
        self.layer = RankLayer(position, activation, None, weights_on_input, parallel.dp_size > 1, part)
        place, sizes = self.loading.place(position), (hidden_size, intermediate_size_per_partition)
        self._loader = ExpertLoader(layer, place, *sizes, place[0].reader, num_experts if self._balanced else None)
        self._loader.register(layer, params_dtype, bias=self.moe.has_bias)
        # The operator finds its layer in the forward context, as vLLM's own does.
        get_current_vllm_config().compilation_config.static_forward_context[_context_key(position)] = self

    def process_weights_after_loading(self, layer: Any) -> None:
        if self._loaded:  # dense layers are being read again
            return
        if layer.expert_map is not None:
            self.layer = replace(self.layer, expert_map=past_the_pool(self.loading.config, lambda: self._map(layer)))
        self._loader.check_complete()
        self.loading.layer_loaded(self.layer.position, layer)
        self._loaded = True

    def _map(self, layer: Any) -> torch.Tensor:
        """See ``RankLayer.expert_map``."""
        local = layer.expert_map
        if not self._balanced:
            return bounded_map(local)
        numbers, mine = owned(local, self.loading.experts.num_experts)
        layer.get_expert_weights = lambda: [mine]
        return numbers

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the routed experts: x [tokens, hidden] to [tokens, hidden]."""
        if not torch.compiler.is_compiling():
            rank_server = self.loading.rank_server
            assert rank_server is not None, "vLLM runs a model before it has finished loading it"
            if rank_server.native is None:
                return rank_server.forward(self.layer, x, topk_weights, topk_ids)
        return torch.ops.vllm_dymoe.moe(x, topk_weights, topk_ids, self.layer.position)


def _scattered(numbers: torch.Tensor | None) -> tuple[int, ...]:
    """Return the experts of a rank among those of all ranks; empty if consecutive.

    Args:
        numbers: int [experts], their numbers on this rank, -1 for those of others; None if it has all.
    """
    mine = [] if numbers is None else (numbers >= 0).nonzero().flatten().tolist()
    return tuple(mine) if mine and mine[-1] - mine[0] >= len(mine) else ()


def loading_of(config: VllmConfig) -> Loading | None:
    """Return the engine's existing loader, if it has one.

    Some drafts (Step-3.5's) have their own quantization config.
    """
    layers = config.compilation_config.static_forward_context.values()
    return next((layer.loading for layer in layers if isinstance(layer, DymoeMoEMethod)), None)


def model_made(config: VllmConfig, model: torch.nn.Module, *, draft: bool) -> None:
    """Handle a model that vLLM has made.

    Raises ConfigError if none of its layers uses our method (drafts and stages may not).
    """
    loading, ours = loading_of(config), config.model_config.quantization == "dymoe"
    stages = ours and config.parallel_config.pipeline_parallel_size > 1
    if stages and not draft:  # only the last one has a draft
        around = layers_around(0 if loading is None else loading.layers)
    if loading is not None:
        loading.model_made(model)
        if stages and not draft:
            loading.around = around
    elif ours and not stages:
        raise ConfigError(
            f"vllm-dymoe: {type(model).__name__} runs none of its experts in vLLM's MoE layer, so all of them "
            "would be on the device; leave --moe-backend out if it is set, else serve this model without "
            "--quantization dymoe."
        )


def _context_key(layer: int) -> str:
    return f"vllm_dymoe.{layer}"


def _moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    method: DymoeMoEMethod = get_forward_context().no_compile_layers[_context_key(layer)]
    rank_server = method.loading.rank_server
    assert rank_server is not None, "vLLM runs a model before it has finished loading it"
    return rank_server.forward(method.layer, x, topk_weights, topk_ids)


def _moe_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


def entry_with_buffers(runner: Any) -> Callable[..., Any] | None:
    """Return what a MoERunner calls instead of vLLM's operator.

    None for others' layers, and without graphs.
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
    return ROUTED if runner.shared_experts is None else ROUTED_AND_SHARED


def _entry(*, shared: bool) -> Callable[..., Any]:
    """Return the replacement of ``vllm::moe_forward`` or ``vllm::moe_forward_shared``.

    The latter also returns shared output.
    """
    allocate = _moe_forward_shared_fake if shared else _moe_forward_fake  # vLLM's rule for the shapes

    def entry(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: LayerNameType,
        hidden_dim_unpadded: int,
    ) -> Any:
        arguments = (hidden_states, router_logits, shared_experts_input, input_ids)
        made = allocate(*arguments, layer_name, hidden_dim_unpadded)
        shared_out, out = made if shared else (None, made)
        torch.ops.vllm_dymoe.moe_forward_into(*arguments, out, shared_out, layer_name)
        return made

    return entry


ROUTED, ROUTED_AND_SHARED = _entry(shared=False), _entry(shared=True)


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
        shared_out.copy_(result[0])
        out.copy_(result[1])


# Not torch.library.custom_op, whose wrappers cost as much as the call itself, in every layer.
_library = torch.library.Library("vllm_dymoe", "DEF")
for _name in ("moe", "moe_in_python"):
    _library.define(f"{_name}(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor")
    _library.impl(_name, _moe, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vllm_dymoe::{_name}", _moe_fake, lib=_library)
if current_platform.is_cpu() and (_native := native.load()) is not None:
    _native.register_operator()  # on the CPU it takes precedence for ``moe``, and calls ``moe_in_python``
# If vLLM has breakable graphs, the operator ends the running capture and begins another one after it.
_interrupting = eager_break_during_capture(_moe_forward_into)
direct_register_custom_op("moe_forward_into", _interrupting, mutates_args=["out", "shared_out"], target_lib=_library)
