"""What MoE layers may ask for: the activation that each means, and what is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.e2e.engines import MODEL
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.vllm_adapter.loading import Loading
from vllm_dymoe.vllm_adapter.model_store import LayerSpec, layer_numbers
from vllm_dymoe.vllm_adapter.moe_method import supported_activation


def layer(name, **numbers):
    defaults = {"activation": MoEActivation(name), "swiglu_limit": None}
    return SimpleNamespace(layer_name="model.layers.3.mlp.experts", moe_config=SimpleNamespace(**(defaults | numbers)))


@pytest.mark.parametrize(
    ("asked", "activation"),
    [
        (layer("silu"), Activation.SILU),
        (layer("gelu_tanh"), Activation.GELU_TANH),
        (layer("swigluoai", swiglu_limit=7.0), Activation.SWIGLU_OAI),
        (layer("silu", swiglu_limit=10.0), Activation(Curve.SWIGLU, limit=10.0)),
        (
            layer("swigluoai_uninterleave", swiglu_limit=6.0, swiglu_alpha=1.5, swiglu_beta=0.5),
            Activation(Curve.SWIGLU, 6.0, 1.5, 0.5),
        ),
        (layer("swiglustep"), Activation(Curve.SWIGLU_STEP, limit=7.0)),
        (layer("situ", activation_situ_beta=4.0), Activation(Curve.SITU, beta=4.0)),
        (
            layer("situ", activation_situ_beta=4.0, activation_situ_linear_beta=25.0),
            Activation(Curve.SITU, limit=25.0, beta=4.0),
        ),
        (layer("relu2_no_mul"), Activation(Curve.RELU2, has_gate=False)),
        (layer("silu_no_mul"), Activation(Curve.SWIGLU, has_gate=False)),
    ],
)
def test_the_activation_of_a_layer(asked, activation):
    assert supported_activation(asked) == activation


def test_vllm_has_no_activation_that_we_have_not():
    numbers = {"swiglu_limit": 7.0, "activation_situ_beta": 1.0}
    plain = {"activation_situ_beta": 1.0}
    for activation in MoEActivation:
        supported_activation(layer(activation.value, **(numbers if "uninterleave" in activation.value else plain)))


@pytest.mark.parametrize(
    "unsupported", [layer("gelu", swiglu_limit=7.0), layer("silu_no_mul", swiglu_limit=7.0), layer("situ")]
)
def test_unsupported_layers_are_refused_by_name(unsupported):
    with pytest.raises(ConfigError) as caught:
        supported_activation(unsupported)
    message = str(caught.value)
    name = unsupported.moe_config.activation.value
    assert message.startswith(f"vllm-dymoe: model.layers.3.mlp.experts needs the expert activation {name}")
    assert message.endswith("serve this model without --quantization dymoe.")


FIRST = {"num_experts": 8, "top_k": 2, "hidden": 64, "intermediate": 96, "dtype": torch.bfloat16, "bias": False}
FIRST |= {"rank": 0, "ranks": 1, "expert_rank": 0, "expert_ranks": 1}


def model_of(*layers):
    load = SimpleNamespace(load_format="auto")
    config = SimpleNamespace(additional_config={}, model_config=SimpleNamespace(model=str(MODEL)), load_config=load)
    model = Loading(config, Options(), None)
    for number, changes in enumerate(layers, 1):
        assert model.add_layer(LayerSpec(f"model.layers.{number}.mlp.experts", **(FIRST | changes))) == number - 1
    return model


@pytest.mark.parametrize(
    "other", [{"hidden": 128}, {"bias": True}, {"activation": Activation(Curve.RELU2, has_gate=False)}]
)
def test_layers_of_another_kind_of_experts_are_refused(other):
    model = model_of({}, {})
    with pytest.raises(
        ConfigError, match=r"experts of model\.layers\.3\.mlp\.experts are of another kind than those of"
    ):
        model.add_layer(LayerSpec("model.layers.3.mlp.experts", **(FIRST | other)))


def test_a_store_has_room_for_the_widest_layer_and_the_one_with_most_experts():
    experts = model_of({"intermediate": 32}, {"num_experts": 12, "top_k": 1}, {"top_k": 4}).experts
    assert experts.formats[4].intermediate == 96
    assert (experts.layers, experts.num_experts, experts.top_k) == ((1, 2, 3), 12, 4)


def test_layers_have_the_numbers_of_the_model_and_none_has_anothers():
    assert layer_numbers(["model.layers.3.mlp.experts", "model.layers.5.mlp.experts"]) == (3, 5)
    both = [f"layers.{number}.mlp.{kind}_experts" for number in (1, 2) for kind in ("text", "vision")]
    assert layer_numbers(both) == (1, 4, 2, 5)
