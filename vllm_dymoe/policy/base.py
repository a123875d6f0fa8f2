"""The question a policy answers, once per MoE layer and step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.experts.tier import Tier


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
