"""The two ends of the precision scale: every expert high, or every expert low."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.experts.tier import Tier


@dataclass(frozen=True)
class UniformPolicy:
    """Gives every active expert the same tier, whatever its importance."""

    tier: Tier

    @property
    def tiers(self) -> frozenset[Tier]:
        """The one tier."""
        return frozenset((self.tier,))

    @property
    def heavy_share(self) -> float | None:
        """None: importance decides nothing."""
        return None

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """Everything for the one tier."""
        return {self.tier: [1.0] * num_layers}

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """The one tier for each active expert."""
        return dict.fromkeys(routing.active, self.tier)
