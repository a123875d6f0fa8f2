"""The activations that we make of a layer's configuration, against what vLLM's own layers compute."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import activation as layers
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.vllm_adapter.activations import activation_of

M3 = {"swiglu_limit": 6.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}


def theirs(name, arguments, x):
    with set_current_vllm_config(VllmConfig()):
        return getattr(layers, name)(**arguments).forward_native(x)


@pytest.mark.parametrize(
    ("moe", "name", "arguments"),
    [
        ({"activation": "silu"}, "SiluAndMul", {}),
        ({"activation": "gelu"}, "GeluAndMul", {}),
        ({"activation": "gelu_tanh"}, "GeluAndMul", {"approximate": "tanh"}),
        ({"activation": "silu", "swiglu_limit": 1.5}, "SiluAndMulWithClamp", {"swiglu_limit": 1.5}),
        (
            {"activation": "swigluoai_uninterleave", **M3},
            "SiluAndMulWithClamp",
            {"swiglu_limit": 6.0, "alpha": 1.702, "beta": 1.0},
        ),
        ({"activation": "swiglustep"}, "SwigluStepAndMul", {"limit": 7.0}),
        ({"activation": "situ", "activation_situ_beta": 4.0}, "SituAndMul", {"beta": 4.0}),
        (
            {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 3.0},
            "SituAndMul",
            {"beta": 4.0, "linear_beta": 3.0},
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_a_gated_activation_is_vllms(moe, name, arguments):
    if not hasattr(layers, name):
        pytest.skip(f"this vLLM has no {name}")
    gate, up = torch.meshgrid(torch.linspace(-12, 12, 49), torch.linspace(-12, 12, 49), indexing="ij")
    want = theirs(name, arguments, torch.stack((gate, up), -1).view(-1, 2))
    config = SimpleNamespace(**{**moe, "activation": MoEActivation(moe["activation"])})
    got = activation_of(SimpleNamespace(moe_config=config)).gated(gate.flatten().clone(), up.flatten())
    torch.testing.assert_close(got, want[:, 0])


def test_an_activation_without_a_gate_is_vllms():
    x = torch.linspace(-6, 6, 101)
    config = SimpleNamespace(activation=MoEActivation("relu2_no_mul"))
    got = activation_of(SimpleNamespace(moe_config=config)).alone(x.clone())
    torch.testing.assert_close(got, theirs("ReLUSquaredActivation", {}, x))
