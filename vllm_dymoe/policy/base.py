"""The question a policy answers, once per MoE layer and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_dymoe.experts.tier import Tier


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Which tokens of a step belong to prompts, and which of these matter most.

    Attributes:
        rows: bool [tokens], of a prompt that is being read; the others are being decoded.
        heavy: bool [tokens], heavy hitters among them; all of them where attention is not known.
        mixed: some tokens of the step are no prompt's.
    """

    rows: torch.Tensor
    heavy: torch.Tensor
    mixed: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for one layer of one step.

    Attributes:
        layer: position of the MoE layer among the model's MoE layers, from 0.
        num_layers: how many MoE layers the model has.
        expert_ids: [tokens, top_k] int, local expert of each pair, -1 where another rank holds it.
        weights: [tokens, top_k] float32 routing weights.
        active: the local experts that occur in ``expert_ids``, ascending.
        prompt: tokens of prompts; None in a step that only decodes.
    """

    layer: int
    num_layers: int
    expert_ids: torch.Tensor
    weights: torch.Tensor
    active: tuple[int, ...]
    prompt: PromptTokens | None = None


class Policy(Protocol):
    """Decides precision and touches nothing: no cache, no transfer, no device state."""

    @property
    def tiers(self) -> frozenset[Tier]:
        """Tiers this policy can ask for; the cache has slots for no others."""
        ...

    @property
    def heavy_share(self) -> float | None:
        """Share of a prompt's tokens that the policy wants marked as heavy hitters; None if it does not ask."""
        ...

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """What share of a layer's active experts gets each tier when one token is decoded, for every layer."""
        ...

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert."""
        ...
