"""Activations that follow from a layer's configuration, compared with vLLM's own."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import activation as layers
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.kernels import Activation
from vllm_dymoe.options import ConfigError
from vllm_dymoe.vllm_plugin.activations import activation_of

M3 = {"swiglu_limit": 6.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}


def ours(name, **numbers):
    moe = SimpleNamespace(**{"activation": MoEActivation(name), "swiglu_limit": None} | numbers)
    return activation_of(SimpleNamespace(layer_name="model.layers.3.mlp.experts", moe_config=moe))


def theirs(name, arguments, x):
    with set_current_vllm_config(VllmConfig()):
        return getattr(layers, name)(**arguments).forward_native(x)


@pytest.mark.parametrize(
    ("activation", "numbers", "name", "arguments"),
    [
        ("silu", {}, "SiluAndMul", {}),
        ("gelu", {}, "GeluAndMul", {}),
        ("gelu_tanh", {}, "GeluAndMul", {"approximate": "tanh"}),
        ("silu", {"swiglu_limit": 1.5}, "SiluAndMulWithClamp", {"swiglu_limit": 1.5}),
        ("swigluoai_uninterleave", M3, "SiluAndMulWithClamp", {"swiglu_limit": 6.0, "alpha": 1.702, "beta": 1.0}),
        ("swiglustep", {}, "SwigluStepAndMul", {"limit": 7.0}),
        ("situ", {"activation_situ_beta": 4.0}, "SituAndMul", {"beta": 4.0}),
        (
            "situ",
            {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 3.0},
            "SituAndMul",
            {"beta": 4.0, "linear_beta": 3.0},
        ),
    ],
)
def test_a_gated_activation_is_vllms(activation, numbers, name, arguments):
    if not hasattr(layers, name):
        pytest.skip(f"this vLLM has no {name}")
    gate, up = torch.meshgrid(torch.linspace(-12, 12, 49), torch.linspace(-12, 12, 49), indexing="ij")
    want = theirs(name, arguments, torch.stack((gate, up), -1).view(-1, 2))
    got = ours(activation, **numbers).gated(gate.flatten().clone(), up.flatten())
    torch.testing.assert_close(got, want[:, 0])


@pytest.mark.parametrize(("activation", "name"), [("relu2_no_mul", "ReLUSquaredActivation"), ("silu_no_mul", None)])
def test_an_activation_without_a_gate_is_vllms(activation, name):
    x = torch.linspace(-6, 6, 101)
    want = theirs(name, {}, x) if name else torch.nn.functional.silu(x)
    torch.testing.assert_close(ours(activation).alone(x.clone()), want)


def test_the_numbers_of_gpt_oss_are_built_into_vllms_kernel():
    assert ours("swigluoai", swiglu_limit=7.0) == Activation.SWIGLU_OAI


def test_vllm_has_no_activation_that_we_have_not():
    for activation in MoEActivation:
        limit = {"swiglu_limit": 7.0} if "uninterleave" in activation.value else {}
        ours(activation.value, activation_situ_beta=1.0, **limit)


@pytest.mark.parametrize(("activation", "limit"), [("gelu", 7.0), ("silu_no_mul", 7.0), ("situ", None)])
def test_unsupported_layers_are_refused_by_name(activation, limit):
    with pytest.raises(ConfigError, match=f"activation {activation} "):
        ours(activation, swiglu_limit=limit)


def test_layers_with_equal_activations_share_one():
    assert ours("silu", swiglu_limit=1.5) is ours("silu", swiglu_limit=1.5), "or executors prepare every layer again"
