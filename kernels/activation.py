"""The activation functions of MoE experts.

They are applied between the gate-and-up and the down projection.
"""

import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


class Curve(Enum):
    """Formula that combines a gate g and an up projection u.

    L, a and b are an Activation's limit, alpha and beta.

    - SWIGLU: c * sigmoid(a c) * (v + b), where c = min(g, L) and v = clamp(u, -L, L).
    - SWIGLU_STEP: min(silu(g), L) * clamp(u, -L, L), used by Step-3.5.
    - SITU: b tanh(g / b) * sigmoid(g) * L tanh(u / L), used by Kimi-K3; without a limit u is not clamped.
    - GELU, GELU_TANH: gelu(g) * u, exact and with the tanh approximation.
    - RELU2: relu(g)^2 * u.
    """

    SWIGLU = "swiglu"
    SWIGLU_STEP = "swiglu_step"
    SITU = "situ"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"


@dataclass(frozen=True)
class Activation:
    """An activation function: a curve and its parameters."""

    curve: Curve  # the formula
    limit: float = float("inf")  # L; infinite for no limit
    alpha: float = 1.0  # a
    beta: float = 0.0  # b
    has_gate: bool = True  # whether experts have a gate projection; without one the curve applies to up alone

    SILU: ClassVar["Activation"]
    GELU: ClassVar["Activation"]
    GELU_TANH: ClassVar["Activation"]
    SWIGLU_OAI: ClassVar["Activation"]  # of GPT-OSS

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the curve to a gate and an up projection, elementwise.

        `gate` is overwritten. The activation is rounded to the tensors' dtype before the product, as in vLLM's native
        path.
        """
        bounded = self.limit != float("inf")
        match self.curve:
            case Curve.SWIGLU:
                if bounded:
                    gate.clamp_(max=self.limit)
                    up = up.clamp(-self.limit, self.limit)
                if self.beta:
                    up = up + self.beta
                if self.alpha == 1:
                    return F.silu(gate, inplace=True).mul_(up)
                return gate.mul_(torch.sigmoid(gate * self.alpha)).mul_(up)
            case Curve.SWIGLU_STEP:
                return F.silu(gate, inplace=True).clamp_(max=self.limit).mul_(up.clamp(-self.limit, self.limit))
            case Curve.SITU:
                gate.copy_((gate / self.beta).tanh_().mul_(self.beta).mul_(gate.sigmoid()))
                return gate.mul_((up / self.limit).tanh_().mul_(self.limit) if bounded else up)
            case Curve.RELU2:
                return gate.relu_().square_().mul_(up)
        return F.gelu(gate, approximate="tanh" if self.curve is Curve.GELU_TANH else "none").mul_(up)

    def alone(self, x: Tensor) -> Tensor:
        """Apply the curve to experts that have no gate, elementwise; `x` is overwritten."""
        return self.gated(x, torch.ones_like(x))

    def __str__(self) -> str:
        name = next((name for name, known in NAMES.items() if known == self), None)
        if name is not None:
            return name
        numbers = [f"{item.name}={getattr(self, item.name)}" for item in fields(self)[1:]]
        return f"{self.curve.value}({', '.join(numbers)})"

    @classmethod
    def parse(cls, text: str) -> "Activation":
        """Parse ``str`` of an Activation; raises ValueError for anything else."""
        if text in NAMES:
            return NAMES[text]
        match = re.fullmatch(r"(\w+)\(limit=(\S+), alpha=(\S+), beta=(\S+), has_gate=(True|False)\)", text)
        if match is None:
            raise ValueError(f"{text!r} is not an activation")
        curve, limit, alpha, beta, has_gate = match.groups()
        return cls(Curve(curve), float(limit), float(alpha), float(beta), has_gate == "True")


Activation.SILU = Activation(Curve.SWIGLU)
Activation.GELU = Activation(Curve.GELU)
Activation.GELU_TANH = Activation(Curve.GELU_TANH)
Activation.SWIGLU_OAI = Activation(Curve.SWIGLU, limit=7.0, alpha=1.702, beta=1.0)

NAMES = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "swiglu_oai": Activation.SWIGLU_OAI,
}
"""Names of the most common activations."""
