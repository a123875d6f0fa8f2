"""The two ends of the precision scale: every expert high, or every expert low."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.policy.base import Routing


@dataclass(frozen=True)
class UniformPolicy:
    """Gives every active expert the same tier, whatever its importance."""

    tier: Tier

    @property
    def tiers(self) -> frozenset[Tier]:
        """The one tier."""
        return frozenset((self.tier,))

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """The one tier for each active expert."""
        return dict.fromkeys(routing.active, self.tier)
