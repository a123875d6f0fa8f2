"""The gated activations, for the epilogues of kernels; their plain twin is Activation.gated."""

import triton
import triton.language as tl

from vllm_dymoe.kernels.activation import Activation

ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.SWIGLU_OAI: 3,
}
"""What a kernel's ACTIVATION constant means."""


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32, elementwise, whatever the shape."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 2:
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        clamped = tl.minimum(gate, 7.0)
        return clamped * tl.sigmoid(1.702 * clamped) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
