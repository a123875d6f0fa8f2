"""Every layer's router as a matrix, from which a linear predictor starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Scoring = Literal["softmax", "sigmoid"]

_PREFIX, _CORRECTION = "gates.", "correction."


@dataclass(frozen=True, eq=False)
class GateWeights:
    """The gates of all MoE layers: logits = x W^T + b."""

    weights: torch.Tensor  # [layers, experts, hidden], in the model's dtype
    biases: torch.Tensor  # float32 [layers, experts]
    correction: torch.Tensor | None = None  # float32 [layers, experts], added to scores for choosing only
    scoring: Scoring = "softmax"  # from logits to the scores that a correction is added to

    def named_correction(self) -> dict[str, torch.Tensor]:
        """Return the correction under a name that includes the scoring; empty without one."""
        return {} if self.correction is None else {correction_name(self.scoring): self.correction}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a file, by name."""
        parts = {"weights": self.weights, "biases": self.biases, **self.named_correction()}
        return {_PREFIX + name: tensor.cpu() for name, tensor in parts.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "GateWeights | None":
        """Return the gates among a file's tensors; None if there are none."""
        found = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        if "weights" not in found:
            return None
        scoring, correction = find_correction(found)
        return cls(found["weights"], found["biases"], correction, scoring)


def correction_name(scoring: Scoring) -> str:
    """Return the name under which ``named_correction`` stores a correction.

    ``scoring`` is that of the gates.
    """
    return _CORRECTION + scoring


def find_correction(tensors: Mapping[str, torch.Tensor]) -> tuple[Scoring, torch.Tensor | None]:
    """Return the scoring and the correction stored among tensors.

    Tensors are named as by ``named_correction``; the correction is None if there is none.
    """
    scorings: tuple[Scoring, ...] = ("softmax", "sigmoid")
    for scoring in scorings:
        if (correction := tensors.get(_CORRECTION + scoring)) is not None:
            return scoring, correction
    return "softmax", None
