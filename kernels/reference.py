"""The plain twin that every kernel is tested against: dequantize everything, compute in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dymoe.kernels.activation import Activation
from vllm_dymoe.kernels.pack import dequantize
from vllm_dymoe.residency.matrix import PackedMatrix


def expert_reference(
    x: Tensor,
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    activation: Activation,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """One expert: down(activation(gate x, up x)), each projection with its bias if it has one: [tokens, hidden], like
    x. Everything is computed in `dtype`, and so is the result. A gate has no rows where there is none."""
    precise = x.to(dtype)
    ups = _linear(precise, up)
    activations = activation.gated(_linear(precise, gate), ups) if activation.has_gate else activation.alone(ups)
    return _linear(activations, down)


def _linear(x: Tensor, packed: PackedMatrix) -> Tensor:
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    return F.linear(x, dequantize(packed, x.dtype), bias)
