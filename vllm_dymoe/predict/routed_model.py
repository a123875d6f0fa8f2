"""What a predictor may know of the model that it is made for."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.residency.identity import ModelIdentity

FAR = 4
"""Layers ahead that are worth asking about where a disk has to be read: it takes as long as several layers compute."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RoutedModel:
    """One rank's model.

    Attributes:
        num_layers: MoE layers on this rank.
        num_experts: experts of a layer on this rank.
        top_k: experts per token.
        gates: of every layer, in order; empty where they are not known.
        held: which experts of a layer are on the device.
        hidden: model width.
        fingerprint: of the weights, which a trained predictor must have been trained for.
        device: where predictions are computed.
        horizon: layers ahead that are worth asking about in decode.
        predictor: file of a trained predictor; None if none was given.
    """

    num_layers: int
    num_experts: int
    top_k: int
    gates: Sequence[Gate] = ()
    held: Callable[[int], Set[int]] = lambda layer: frozenset()
    hidden: int = 0
    fingerprint: str = ""
    device: torch.device = _CPU
    horizon: int = 1
    predictor: Path | None = None

    @property
    def identity(self) -> ModelIdentity:
        """The model as a trained predictor has to have it; its name does not matter."""
        return ModelIdentity("", self.fingerprint, self.num_layers, self.num_experts, self.top_k, self.hidden)
