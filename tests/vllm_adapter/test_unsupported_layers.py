"""What a MoE layer may ask for that we do not do: each is refused by name, when the model is created."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.e2e.engines import MODEL
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.vllm_adapter.loading import Loading
from vllm_dymoe.vllm_adapter.moe_method import _refuse_unsupported
from vllm_dymoe.vllm_adapter.store import LayerSpec


def refuse(layer=(), **moe):
    parallel = {"enable_eplb": False, "dp_size": 1}
    defaults = {
        "activation": MoEActivation.SILU,
        "swiglu_limit": None,
        "experts_per_token": 2,
        "has_bias": True,
        "is_lora_enabled": False,
        "moe_parallel_config": SimpleNamespace(**parallel),
    }
    settings = {"layer_name": "model.layers.3.mlp.experts", "apply_router_weight_on_input": False, **dict(layer)}
    _refuse_unsupported(SimpleNamespace(**settings), SimpleNamespace(**(defaults | moe)))


@pytest.mark.parametrize(
    "supported",
    [
        {},
        {"activation": MoEActivation.SWIGLUOAI},
        {"activation": MoEActivation.GELU_TANH},
        {"experts_per_token": 1, "layer": {"apply_router_weight_on_input": True}},
    ],
)
def test_supported_layers_are_not_refused(supported):
    refuse(**supported)


@pytest.mark.parametrize(
    ("unsupported", "problem"),
    [
        ({"activation": MoEActivation.SILU_NO_MUL}, "the expert activation silu_no_mul"),
        ({"activation": MoEActivation.SWIGLUSTEP}, "the expert activation swiglustep"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU in the experts"),
        ({"layer": {"apply_router_weight_on_input": True}}, "router weights on the input of several experts"),
    ],
)
def test_unsupported_layers_are_refused_by_name(unsupported, problem):
    with pytest.raises(ConfigError) as caught:
        refuse(**unsupported)
    message = str(caught.value)
    assert message.startswith(f"vllm-dymoe: model.layers.3.mlp.experts needs {problem}")
    assert message.endswith("serve this model without --quantization dymoe.")


@pytest.mark.parametrize("other", [{"num_experts": 4}, {"intermediate": 64}, {"top_k": 1}, {"bias": True}])
def test_layers_of_different_experts_are_refused(other):
    load = SimpleNamespace(load_format="auto")
    config = SimpleNamespace(additional_config={}, model_config=SimpleNamespace(model=str(MODEL)), load_config=load)
    model = Loading(config, Options(), None)
    first = {"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "dtype": torch.bfloat16, "bias": False}
    first |= {"rank": 0, "ranks": 1, "expert_rank": 0, "expert_ranks": 1}
    model.add_layer(LayerSpec(name="model.layers.1.mlp.experts", **first))
    assert model.add_layer(LayerSpec(name="model.layers.2.mlp.experts", **first)) == 1
    with pytest.raises(
        ConfigError, match=r"experts of model\.layers\.3\.mlp\.experts have another shape than those of"
    ):
        model.add_layer(LayerSpec(name="model.layers.3.mlp.experts", **(first | other)))
