"""Translates the activation of vLLM's MoE layers into that of our kernels."""

from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_dymoe.kernels import Activation, Curve
from vllm_dymoe.options import ConfigError

# By name, because vLLM 0.26 does not have all of them.
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
_SAME: dict[Activation, Activation] = {}  # one object for equal ones: an executor prepares each object that it is given
_STEP_LIMIT = 7.0  # of Step-3.5, built into vLLM's kernel for it


def activation_of(layer: Any) -> Activation:
    """Return the activation of a RoutedExperts' experts.

    Raises:
        ConfigError: the kernels do not have it.
    """
    if (known := _known(layer)) is None:
        raise ConfigError(
            f"vllm-dymoe: {layer.layer_name} needs the expert activation {layer.moe_config.activation.value} with "
            f"limit {layer.moe_config.swiglu_limit}, which is not supported yet; serve this model without "
            "--quantization dymoe."
        )
    return _SAME.setdefault(known, known)


def _known(layer: Any) -> Activation | None:
    moe = layer.moe_config
    function: MoEActivation = moe.activation
    if function is MoEActivation.SWIGLUOAI:  # vLLM's kernel has its numbers built in
        return Activation.SWIGLU_OAI

    def number(name: str) -> float | None:
        """Return a number of the layer's configuration.

        vLLM 0.26 has such numbers in the layer only.
        """
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
    # A limit is not defined for other curves.
    return None if curve is None or limit is not None else Activation(curve, has_gate=has_gate)
