"""Other ways to choose as many experts as DyMoE does: at random, the same share in every layer, one layer alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PrivateAttr

from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.systems import System
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.schedule import Schedule


@dataclass(frozen=True)
class EqualSchedule(Schedule):
    """The same share of critical experts at every depth, in place of Eq. 4."""

    def ratio(self, layer: int, num_layers: int) -> float:
        """r itself."""
        return self.retention


class Chosen(Dymoe):
    """DyMoE with one or both of its ideas taken out (its Figure 3)."""

    name: ClassVar[str] = "chosen"

    by_importance: bool
    """Which experts are critical; else a fixed sequence of random numbers says."""
    by_depth: bool
    """How many of a layer are, by Eq. 4; else as many in every layer."""
    _random: random.Random = PrivateAttr(default_factory=lambda: random.Random(0))

    @property
    def schedule(self) -> Schedule:
        """By depth, or not."""
        return super().schedule if self.by_depth else EqualSchedule(self.retention, self.rounding)

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert."""
        if self.by_importance:
            return super().select(routing)
        critical = self.schedule.critical(routing.layer, routing.num_layers, len(routing.active))
        high = set(self._random.sample(routing.active, critical))
        return {expert: Tier.HI if expert in high else Tier.LO for expert in routing.active}


class OneLayerLow(System):
    """Every expert of one layer low, every other one high (DyMoE's Figure 5)."""

    name: ClassVar[str] = "one layer low"

    layer: int

    @property
    def tiers(self) -> frozenset[Tier]:
        """Both."""
        return frozenset((Tier.HI, Tier.LO))

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """All of a layer's experts are in one tier."""
        low = [float(layer == self.layer) for layer in range(num_layers)]
        return {Tier.HI: [1 - share for share in low], Tier.LO: low}

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        """The layer's tier."""
        return dict.fromkeys(routing.active, Tier.LO if routing.layer == self.layer else Tier.HI)
