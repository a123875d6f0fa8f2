"""Other ways to choose as many experts as DyMoE does: at random, the same share in every layer, one layer alone."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.policy import DymoeOptions, DymoePolicy, Routing
from vllm_dymoe.policy.schedule import Schedule


@dataclass(frozen=True)
class EqualSchedule(Schedule):
    """The same share of critical experts at every depth, in place of Eq. 4."""

    def ratio(self, layer: int, num_layers: int) -> float:
        """r itself."""
        return self.retention


class ChosenPolicy(DymoePolicy):
    """DyMoE's policy with one or both of its ideas taken out (its Figure 3).

    Args:
        options: of the policy.
        by_importance: which experts are critical; else a fixed sequence of random numbers says.
        by_depth: how many of a layer are, by Eq. 4; else as many in every layer.
    """

    def __init__(self, options: DymoeOptions, *, by_importance: bool, by_depth: bool) -> None:
        super().__init__(options)
        if not by_depth:
            self._schedule = EqualSchedule(options.retention, options.rounding)
        self._random = None if by_importance else random.Random(0)

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert."""
        if self._random is None:
            return super().plan(routing)
        critical = self._schedule.critical(routing.layer, routing.num_layers, len(routing.active))
        high = set(self._random.sample(routing.active, critical))
        return {expert: Tier.HI if expert in high else Tier.LO for expert in routing.active}


@dataclass(frozen=True)
class OneLayerLow:
    """Every expert of one layer low, every other one high (DyMoE's Figure 5)."""

    layer: int
    heavy_share: float | None = None

    @property
    def tiers(self) -> frozenset[Tier]:
        """Both."""
        return frozenset((Tier.HI, Tier.LO))

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """All of a layer's experts are in one tier."""
        low = [float(layer == self.layer) for layer in range(num_layers)]
        return {Tier.HI: [1 - share for share in low], Tier.LO: low}

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """The layer's tier."""
        return dict.fromkeys(routing.active, Tier.LO if routing.layer == self.layer else Tier.HI)
