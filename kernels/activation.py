"""The gated activations of MoE experts."""

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


class Activation(Enum):
    """What is done to the gate projection before it multiplies the up projection.

    SWIGLU_OAI is GPT-OSS's: gate * sigmoid(1.702 gate) * (up + 1), after the gate was clamped to at most 7 and up to
    -7 ... 7.
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLU_OAI = "swiglu_oai"

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """activation(gate) * up, elementwise; `gate` is overwritten.

        The activation is rounded to the tensors' dtype before the product, as in vLLM's own native path.
        """
        if self is Activation.SILU:
            return F.silu(gate, inplace=True).mul_(up)
        if self is Activation.SWIGLU_OAI:
            gate.clamp_(max=_OAI_LIMIT)
            return gate.mul_(torch.sigmoid(gate * _OAI_ALPHA)).mul_(up.clamp(-_OAI_LIMIT, _OAI_LIMIT).add_(1))
        return F.gelu(gate, approximate="tanh" if self is Activation.GELU_TANH else "none").mul_(up)
