"""Layers of one model share a store: what differs too much is refused by name, and how each is numbered."""

from types import SimpleNamespace

import pytest
import torch

from tests.e2e.engines import MODEL
from vllm_dymoe.config import ConfigError, Options
from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.vllm_adapter.loading import Loading
from vllm_dymoe.vllm_adapter.model_store import LayerSpec, layer_numbers

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
