"""DyMoE's policy: the experts that matter most to a step are high, fewer of them the deeper the layer (4.2 and 4.3).

A step may hold tokens of several prompts and of several requests that decode. Each phase decides with its own measure:
the prompts' tokens by heavy hitters, the decoded ones by routing weights, each over the experts that its own tokens use
and each with Eq. 5. An expert is high if either phase wants it so; a long prompt beside it cannot cost a request that
decodes its precision. Within a phase requests are one batch: their heavy hitters and their weights add up.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_dymoe.experts.routing import Routing
from vllm_dymoe.experts.tier import Tier
from vllm_dymoe.policy.importance import gate_importance, most_important, step_importance
from vllm_dymoe.policy.schedule import Schedule


class DymoeOptions(BaseModel):
    """Parameters of the policy ``dymoe``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    retention: float = Field(default=0.75, ge=0, le=1)
    """r: the average share of a layer's active experts that stay high."""
    heavy_share: float = Field(default=0.2, gt=0, le=1)
    """Share of a prompt's tokens that count as heavy hitters."""
    rounding: Literal["up", "nearest"] = "up"
    """Of the number of high experts: up as Eq. 5 has it, or to the nearest."""


class DymoePolicy:
    """High for the critical experts of a step, low for the others.

    Args:
        options: parameters.
    """

    def __init__(self, options: DymoeOptions) -> None:
        self.options = options
        self._schedule = Schedule(options.retention, options.rounding)
        ends: dict[float, frozenset[Tier]] = {0: frozenset((Tier.LO,)), 1: frozenset((Tier.HI,))}
        self._tiers = ends.get(options.retention, frozenset((Tier.HI, Tier.LO)))

    @property
    def tiers(self) -> frozenset[Tier]:
        """Both, or only one at the two ends of the scale."""
        return self._tiers

    @property
    def heavy_share(self) -> float | None:
        """As the parameter says."""
        return self.options.heavy_share

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """Of ``top_k`` active experts: what rounding makes of r(l)."""
        high = [self._schedule.critical(layer, num_layers, top_k) / top_k for layer in range(num_layers)]
        shares = {Tier.HI: high, Tier.LO: [1 - share for share in high]}
        return {tier: shares[tier] for tier in self.tiers}

    def plan(self, routing: Routing) -> Mapping[int, Tier]:
        """The tier of each active expert."""
        prompt = routing.prompt
        active = len(routing.active)
        if self._critical(routing, active) == active:  # and so is every part of them
            return dict.fromkeys(routing.active, Tier.HI)
        if prompt is None and len(routing.ids) == 1:  # decode of one request
            importance = gate_importance(routing.host_ids, routing.host_weights)
            high = most_important(importance, self._critical(routing, active))
        else:
            load, gate = step_importance(routing.ids, routing.weights, 1 + max(routing.active, default=0), prompt)
            high = most_important(load, self._critical(routing, len(load)))
            high |= most_important(gate, self._critical(routing, len(gate)))
        return {expert: Tier.HI if expert in high else Tier.LO for expert in routing.active}

    def _critical(self, routing: Routing, active: int) -> int:
        return self._schedule.critical(routing.layer, routing.num_layers, active)
