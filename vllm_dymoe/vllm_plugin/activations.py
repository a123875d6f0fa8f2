"""What vLLM says of the activation of a MoE layer, as our kernels have it."""

from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.options import ConfigError

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
_STEP_LIMIT = 7.0  # of Step-3.5, which vLLM's kernel for it has built in


def activation_of(layer: Any) -> Activation:
    """The activation of the experts of a RoutedExperts; ConfigError for one that kernels do not have."""
    if (known := _known(layer)) is None:
        raise ConfigError(
            f"vllm-dymoe: {layer.layer_name} needs the expert activation {layer.moe_config.activation.value} with "
            f"limit {layer.moe_config.swiglu_limit}, which is not supported yet; serve this model without "
            "--quantization dymoe."
        )
    return known


def _known(layer: Any) -> Activation | None:
    moe = layer.moe_config
    function: MoEActivation = moe.activation
    if function is MoEActivation.SWIGLUOAI:  # whose numbers vLLM's kernel has built in
        return Activation.SWIGLU_OAI

    def number(name: str) -> float | None:
        """A number that the layer's configuration has, or in vLLM 0.26 only the layer."""
        found: float | None = getattr(moe, name, None)
        return getattr(layer, name, None) if found is None else found

    name = function.value.removesuffix("_no_mul")
    curve, has_gate = _CURVES.get(name), function.is_gated
    limit = number("swiglu_limit")
    if curve is Curve.SITU:
        beta, linear_beta = (getattr(moe, f"activation_situ_{part}", None) for part in ("beta", "linear_beta"))
        return (
            None if beta is None else Activation(curve, limit=max(linear_beta or 0.0, 0.0) or float("inf"), beta=beta)
        )
    if curve is Curve.SWIGLU_STEP:
        return Activation(curve, limit=_STEP_LIMIT)
    if curve is Curve.SWIGLU and has_gate:
        if name == "swigluoai_uninterleave":
            alpha, beta = number("swiglu_alpha"), number("swiglu_beta") or 0.0
            return None if limit is None else Activation(curve, limit, 1.0 if alpha is None else alpha, beta)
        return Activation(curve) if limit is None else Activation(curve, limit)
    # What a limit of another curve would mean is not defined.
    return None if curve is None or limit is not None else Activation(curve, has_gate=has_gate)
