"""DyMoE: the most important experts of a step are high (4.2 and 4.3).

Deeper layers have fewer high experts. A step may contain tokens of several prompts and of several decoding requests.
Each phase measures importance in its own way, prompts by heavy hitters and decoded tokens by routing weights, over the
experts that its own tokens use, and with its own threshold or Eq. 5. An expert is high if either phase wants it high,
so a long prompt in the same step never lowers the precision of a decoding request. Within a phase, the heavy hitters
and weights of all requests add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from vllm_dymoe.planner.importance import high_of_step
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.threshold import threshold_for
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.schedule import Schedule


@dataclass(frozen=True)
class CriticalHigh(PrecisionPolicy):
    """High for critical experts, low for the others.

    Critical are the experts above a threshold, or as many as a schedule says.
    """

    schedule: Schedule = field(default_factory=lambda: Schedule(0.75))
    """Number of critical experts by depth (Eqs. 4 and 5), used without thresholds."""
    high_ahead: bool = False  # fetch only those predicted experts that will be high

    by_importance: ClassVar[bool] = True

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        """Return each precision's expected share of ``top_k`` active experts.

        The high share is retention with thresholds, and otherwise the rounded r(l); see the base class.
        """
        high = [self._critical(layer, num_layers, top_k) / top_k for layer in range(num_layers)]
        if self.thresholds:
            high = [max(self.schedule.retention, 1 / top_k)] * num_layers
        shares = {Precision.HIGH: high, Precision.LOW: [1 - share for share in high]}
        return {precision: shares[precision] for precision in self.precisions}

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        if len(self.precisions) == 1:
            return dict.fromkeys(routing.active, *self.precisions)
        critical = partial(self._critical, routing.layer, routing.num_layers)
        high = high_of_step(routing, self.thresholds, critical)
        return {expert: Precision.HIGH if expert in high else Precision.LOW for expert in routing.active}

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        counts = [[self._critical(layer, num_layers, n) for n in range(experts + 1)] for layer in range(num_layers)]
        return np.array(counts, np.int32)

    def begin(self, curves: Sequence[Sequence[float]]) -> None:
        start = int(threshold_for(self.schedule.retention)[0])
        for threshold, curve in zip(self.thresholds, curves, strict=False):
            if threshold[0] == start:  # if it has not moved
                threshold[:] = threshold_for(self.schedule.retention, curve)

    def count_ahead(self, layer: int, num_layers: int, named: int) -> tuple[int, int]:
        """Return how many predicted experts are fetched high, and how many at all.

        As many are high as the layer's t_l (Eqs. 5, 7 and 8) or retention says. The others are low or skipped.
        """
        if self.thresholds:
            high = min(named, max(1, round(self.schedule.retention * named)))
        else:
            high = self._critical(layer, num_layers, named)
        return high, high if self.high_ahead else named

    def _critical(self, layer: int, num_layers: int, active: int) -> int:
        return self.schedule.critical(layer, num_layers, active)


class Dymoe(Exact):
    """Serves the critical experts of a step high and the others low.

    Experts are kept and predicted as by ``exact``.
    """

    name: ClassVar[str] = "dymoe"
    summary: ClassVar[str] = "DyMoE: the most important experts of a step at `high`, the others at `low`"
    default_low: ClassVar[int] = 2
    precision_parameters: ClassVar[tuple[str, ...]] = (
        "retention",
        "high_by",
        "heavy_share",
        "rounding",
        "skipped_weights",
    )

    retention: float = Field(default=0.75, ge=0, le=1)
    """r: average share of a layer's active experts that are high."""
    high_by: Literal["threshold", "depth", "equal"] = "threshold"
    """How high experts are chosen: those whose routing weight exceeds one threshold for all layers; the largest of each
    layer, fewer in deeper layers (Eq. 4); or equally many in every layer.
    """
    heavy_share: float = Field(default=1, gt=0, le=1)
    """Share of a prompt's tokens that count: those that get the most attention (heavy hitters)."""
    rounding: Literal["up", "nearest"] = "up"
    """Rounding of the number of high experts, used without a threshold (Eq. 5 rounds up)."""
    skipped_weights: Literal["keep", "renormalize"] = "keep"
    """What happens to the routing weights of skipped experts: they are lost, or go to the token's other experts."""
    ahead: Literal["all", "high"] = "all"
    """Which predicted experts are fetched: all, or only those that will be high (the paper)."""
    reuse_high: bool = True
    """Whether an expert that is wanted low is computed high if its high version is resident."""

    _around: tuple[int, int] = PrivateAttr((0, 0))  # MoE layers of earlier and of later stages

    def of_stage(self, before: int, behind: int) -> "Dymoe":
        # A new object, whose precision is not cached yet.
        placed = type(self)(**{name: getattr(self, name) for name in type(self).model_fields})
        placed._around = before, behind
        return placed

    @cached_property
    def precision(self) -> CriticalHigh:
        """Both precisions; only one if retention is 0 or 1."""
        by_threshold = self.high_by == "threshold" and 0 < self.retention < 1
        return CriticalHigh(
            frozenset(
                precision
                for precision, used in ((Precision.HIGH, self.retention > 0), (Precision.LOW, self.retention < 1))
                if used
            ),
            heavy_hitters=self.heavy_share,
            reuses_high=self.reuse_high,
            renormalizes=self.skipped_weights == "renormalize",
            high_ahead=self.ahead == "high",
            schedule=Schedule(self.retention, self.rounding, self.high_by != "equal", *self._around),
            thresholds=(threshold_for(self.retention), threshold_for(self.retention)) if by_threshold else (),
        )
