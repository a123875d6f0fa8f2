"""What vLLM says of the activation of a MoE layer, as our kernels have it."""

from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.kernels import Activation, Curve

# By name: vLLM 0.26 has not all of them.
_CURVES = {
    "silu": Curve.SWIGLU,
    "gelu": Curve.GELU,
    "gelu_tanh": Curve.GELU_TANH,
    "relu2": Curve.RELU2,
    "swigluoai": Curve.SWIGLU,
    "swigluoai_uninterleave": Curve.SWIGLU,
    "swiglustep": Curve.SWIGLU_STEP,
    "situ": Curve.SITU,
}
_STEP_LIMIT = 7.0
"""Of Step-3.5, which vLLM's kernel for it has built in."""


def activation_of(layer: Any) -> Activation | None:
    """The activation of a layer's experts; None for one that kernels do not have.

    Args:
        layer: a RoutedExperts.
    """
    moe = layer.moe_config
    function: MoEActivation = moe.activation
    if function is MoEActivation.SWIGLUOAI:  # whose numbers vLLM's kernel has built in
        return Activation.SWIGLU_OAI
    name = function.value.removesuffix("_no_mul")
    curve, has_gate = _CURVES.get(name), function.is_gated
    limit, alpha, beta = (_number(layer, f"swiglu_{number}") for number in ("limit", "alpha", "beta"))
    if curve is Curve.SITU:
        return _situ(getattr(moe, "activation_situ_beta", None), getattr(moe, "activation_situ_linear_beta", None))
    if curve is Curve.SWIGLU_STEP:
        return Activation(curve, limit=_STEP_LIMIT)
    if curve is Curve.SWIGLU and has_gate:
        if name == "swigluoai_uninterleave":
            return None if limit is None else Activation(curve, limit, 1.0 if alpha is None else alpha, beta or 0.0)
        return Activation(curve) if limit is None else Activation(curve, limit)
    # Nobody says what a limit of another curve would mean.
    return None if curve is None or limit is not None else Activation(curve, has_gate=has_gate)


def _number(layer: Any, name: str) -> float | None:
    """A number that the layer's configuration has, or in vLLM 0.26 only the layer."""
    found: float | None = getattr(layer.moe_config, name, None)
    return getattr(layer, name, None) if found is None else found


def _situ(beta: float | None, linear_beta: float | None) -> Activation | None:
    if beta is None:
        return None
    bounded = linear_beta is not None and linear_beta > 0
    return Activation(Curve.SITU, limit=linear_beta if bounded and linear_beta else float("inf"), beta=beta)
