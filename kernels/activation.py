"""The gated activations of MoE experts."""

from enum import Enum

import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    """What is done to the gate projection before it multiplies the up projection."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up, elementwise; `gate` is overwritten.

        The activation is rounded to the tensors' dtype before the product, as in vLLM's own native path.
        """
        if self is Activation.SILU:
            return F.silu(gate, inplace=True).mul_(up)
        return F.gelu(gate, approximate="tanh" if self is Activation.GELU_TANH else "none").mul_(up)
