"""DyMoE: the experts that matter most to a step are high, fewer of them the deeper the layer (4.2 and 4.3).

A step may hold tokens of several prompts and of several requests that decode. Each phase decides with its own measure:
the prompts' tokens by heavy hitters, the decoded ones by routing weights, each over the experts that its own tokens use
and each with Eq. 5. An expert is high if either phase wants it so; a long prompt beside it cannot cost a request that
decodes its precision. Within a phase requests are one batch: their heavy hitters and their weights add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.base import Precision, Residency
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.systems.importance import gate_importance, most_important, step_importance
from vllm_dymoe.systems.schedule import Schedule

_IDLE = 0.25  # of what retention says: less than that is an idle tier


@dataclass(frozen=True)
class CriticalHigh(Precision):
    """High for as many as the schedule says, the most important first; low for the others.

    Attributes:
        schedule: how many experts are critical, by depth (Eqs. 4 and 5).
    """

    schedule: Schedule = field(default_factory=lambda: Schedule(0.75))

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """Of ``top_k`` active experts: what rounding makes of r(l)."""
        high = [self.schedule.critical(layer, num_layers, top_k) / top_k for layer in range(num_layers)]
        shares = {Tier.HI: high, Tier.LO: [1 - share for share in high]}
        return {tier: shares[tier] for tier in self.tiers}

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        active = len(routing.active)
        if self._critical(routing, active) == active:  # and so is every part of them
            return dict.fromkeys(routing.active, Tier.HI)
        high = self.critical(routing)
        return {expert: Tier.HI if expert in high else Tier.LO for expert in routing.active}

    def critical(self, routing: Routing) -> set[int]:
        """The most important experts of a step (4.2)."""
        prompt = routing.prompt
        if prompt is None and len(routing.ids) == 1:  # decode of one request
            importance = gate_importance(routing.host_ids, routing.host_weights)
            return most_important(importance, self._critical(routing, len(routing.active)))
        load, gate = step_importance(routing.ids, routing.weights, 1 + max(routing.active, default=0), prompt)
        high = most_important(load, self._critical(routing, len(load)))
        return high | most_important(gate, self._critical(routing, len(gate)))

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """Eq. 5 for every layer and number of active experts."""
        critical = self.schedule.critical
        counts = [[critical(layer, num_layers, n) for n in range(experts + 1)] for layer in range(num_layers)]
        return np.array(counts, np.int32)

    def tiers_ahead(self, layer: int, num_layers: int, named: Sequence[int]) -> Mapping[int, Tier]:
        """High for as many as the coming layer's t says (Eqs. 5, 7 and 8), the others low."""
        high = set(named[: self.schedule.critical(layer, num_layers, len(named))])
        return {expert: Tier.HI if expert in high else Tier.LO for expert in named}

    def warnings(self, num_layers: int, top_k: int) -> Sequence[str]:
        """Where rounding leaves one of two tiers, in decode, less than a quarter of what retention says."""
        schedule, found = self.schedule, []
        realised = schedule.realised(num_layers, top_k)
        for name, wanted, share in (
            ("low", 1 - schedule.retention, 1 - realised),
            ("high", schedule.retention, realised),
        ):
            if share < _IDLE * wanted:
                other = "nearest" if schedule.rounding == "up" else "up"
                found.append(
                    f'rounding "{schedule.rounding}" leaves the {name} tier {share:.1%} of a token\'s experts where '
                    f"retention {schedule.retention:g} says {wanted:.0%}, so it is idle in decode; set rounding to "
                    f'"{other}" in system_options, or change retention.'
                )
        return found

    def _critical(self, routing: Routing, active: int) -> int:
        return self.schedule.critical(routing.layer, routing.num_layers, active)


class Dymoe(Exact):
    """High for the critical experts of a step, low for the others; kept and foreseen as by ``exact``."""

    name: ClassVar[str] = "dymoe"
    summary: ClassVar[str] = "DyMoE: experts that matter to the step at `hi`, the others at `lo`"
    default_lo: ClassVar[int] = 2
    precision_parameters: ClassVar[tuple[str, ...]] = ("retention", "heavy_share", "rounding", "skipped_weights")

    retention: float = Field(default=0.75, ge=0, le=1)
    """r: the average share of a layer's active experts that stay high; at 0 all are low, at 1 all are high."""
    heavy_share: float = Field(default=1, gt=0, le=1)
    """Share of a prompt's tokens that count, those that attention dwells on (the paper's heavy hitters); 1 is all."""
    rounding: Literal["up", "nearest"] = "up"
    """Of the number of high experts: up as Eq. 5 has it, or to the nearest."""
    skipped_weights: Literal["keep", "renormalize"] = "keep"
    """Routing weights of experts that are skipped: lost, or handed to the token's other experts."""
    reuse_high: bool = True
    """Whether an expert that is wanted low is computed high where its high version is on the device."""

    @cached_property
    def precision(self) -> CriticalHigh:
        """Both tiers, or only one at the two ends of the scale."""
        return CriticalHigh(
            frozenset(tier for tier, used in ((Tier.HI, self.retention > 0), (Tier.LO, self.retention < 1)) if used),
            heavy_hitters=self.heavy_share,
            reuses_high=self.reuse_high,
            renormalizes=self.skipped_weights == "renormalize",
            schedule=Schedule(self.retention, self.rounding),
        )

    @cached_property
    def residency(self) -> Residency:
        """A device cannot hand on the weights of skipped experts."""
        return Residency(on_device=not self.precision.renormalizes)
