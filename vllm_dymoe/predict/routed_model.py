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
    """One rank's model."""

    num_layers: int  # MoE layers on this rank
    num_experts: int  # experts of a layer on this rank
    top_k: int  # experts per token
    gates: Sequence[Gate] = ()  # of every layer, in order; empty where they are not known
    held: Callable[[int], Set[int]] = lambda layer: frozenset()  # which experts of a layer are on the device
    hidden: int = 0  # model width
    fingerprint: str = ""  # of the weights, which a trained predictor must have been trained for
    device: torch.device = _CPU  # where predictions are computed
    horizon: int = 1  # layers ahead that are worth asking about in decode
    predictor: Path | None = None  # file of a trained predictor; None if none was given

    @property
    def identity(self) -> ModelIdentity:
        """The model as a trained predictor has to have it; its name does not matter."""
        return ModelIdentity("", self.fingerprint, self.num_layers, self.num_experts, self.top_k, self.hidden)
