"""The question a policy answers, once per MoE layer and step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dymoe.experts.tier import Tier


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for one layer of one step.

    Attributes:
        layer: position of the MoE layer among the model's MoE layers, from 0.
        expert_ids: [tokens, top_k] int, local expert of each pair, -1 where another rank holds it.
        weights: [tokens, top_k] float32 routing weights.
        active: the local experts that occur in ``expert_ids``, ascending.
    """

    layer: int
    expert_ids: torch.Tensor
    weights: torch.Tensor
    active: tuple[int, ...]


class Policy(Protocol):
    """Decides precision and touches nothing: no cache, no transfer, no device state."""

    @property
    def tiers(self) -> frozenset[Tier]:
        """Tiers this policy can ask for; the cache has slots for no others."""
        ...

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert."""
        ...
