"""Activations and down's input rotation, for kernel epilogues.

Plain twins: ``Activation.gated`` and ``lattice.rotate``.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.activation import Activation, Curve
from vllm_dymoe.kernels.triton.rotate import rotate
from vllm_dymoe.kernels.triton.section import down_rotation

_CURVES = {
    Curve.SWIGLU: 0,
    Curve.GELU: 1,
    Curve.GELU_TANH: 2,
    Curve.SWIGLU_STEP: 3,
    Curve.SITU: 4,
    Curve.RELU2: 5,
}
_NO_LIMIT = 3e38


def constants(activation: Activation) -> tuple[int, float, float, float, bool]:
    """Return a kernel's ACTIVATION: (curve, limit, alpha, beta, has a gate)."""
    limit = min(activation.limit, _NO_LIMIT)
    return _CURVES[activation.curve], limit, activation.alpha, activation.beta, activation.has_gate


@triton.jit
def down_inputs(gate, up, first, ROWS: tl.constexpr, PRECISIONS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the float32 inputs of down, rotated if codes are lattice points.

    gate and up are [positions, rows]. Their rows, which begin at `first`, are whole rotated blocks.
    """
    result = gated(gate, up, ACTIVATION)
    if down_rotation(ROWS, PRECISIONS) > 0:
        result = rotate(result, first, down_rotation(ROWS, PRECISIONS))
    return result


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Apply the curve to gate and up elementwise, in float32; without a gate, to up."""
    CURVE: tl.constexpr = ACTIVATION[0]
    LIMIT: tl.constexpr = ACTIVATION[1]
    ALPHA: tl.constexpr = ACTIVATION[2]
    BETA: tl.constexpr = ACTIVATION[3]
    BOUNDED: tl.constexpr = LIMIT < 1e38
    if not ACTIVATION[4]:
        gate = up
        up = tl.full(gate.shape, 1.0, tl.float32)
    if CURVE == 0:
        if BOUNDED:
            gate = tl.minimum(gate, LIMIT)
        gate = gate * tl.sigmoid(gate if ALPHA == 1.0 else ALPHA * gate)
        if BOUNDED:
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if BETA != 0.0:
            up = up + BETA
        return gate * up
    elif CURVE == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif CURVE == 2:
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif CURVE == 3:
        return tl.minimum(gate * tl.sigmoid(gate), LIMIT) * tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    elif CURVE == 4:
        if BOUNDED:
            up = LIMIT * (2.0 * tl.sigmoid(2.0 * up / LIMIT) - 1.0)
        return BETA * (2.0 * tl.sigmoid(2.0 * gate / BETA) - 1.0) * tl.sigmoid(gate) * up
    else:
        positive = tl.maximum(gate, 0.0)
        return positive * positive * up
