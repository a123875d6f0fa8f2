"""DyMoE: the experts that matter most to a step are high, fewer of them the deeper the layer (4.2 and 4.3).

A step may hold tokens of several prompts and of several requests that decode. Each phase decides with its own measure:
the prompts' tokens by heavy hitters, the decoded ones by routing weights, each over the experts that its own tokens use
and each with a threshold, or Eq. 5. An expert is high if either phase wants it so; a long prompt beside it cannot cost
a request that decodes its precision. Within a phase requests are one batch: their heavy hitters and weights add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from vllm_dymoe.planner.importance import high_of_step
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.rule import Ints
from vllm_dymoe.planner.threshold import above, follow, threshold_for
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.schedule import Schedule


@dataclass(frozen=True)
class CriticalHigh(PrecisionPolicy):
    """High for the experts above one threshold, or for as many as a schedule says; low for the others."""

    schedule: Schedule = field(default_factory=lambda: Schedule(0.75))
    """How many experts are critical, by depth (Eqs. 4 and 5), where there are no thresholds."""
    high_ahead: bool = False  # of predicted experts only those that will be high are fetched

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        """Of ``top_k`` active experts: retention, or what rounding makes of r(l)."""
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

    def chooser(self, num_layers: int) -> Callable[[int, Ints], NDArray[np.bool_]]:
        """For replays of decode: which experts of a layer are high, by their sums, with a threshold of its own."""
        threshold = threshold_for(self.schedule.retention)

        def choose(layer: int, sums: Ints) -> NDArray[np.bool_]:
            if self.thresholds:
                high = above(threshold, sums)
                follow(threshold, int(high.sum()), len(sums))
            else:
                high = np.zeros(len(sums), bool)
                high[np.argsort(-sums, kind="stable")[: self._critical(layer, num_layers, len(sums))]] = True
            return high

        return choose

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        counts = [[self._critical(layer, num_layers, n) for n in range(experts + 1)] for layer in range(num_layers)]
        return np.array(counts, np.int32)

    def begin(self, curves: Sequence[Sequence[float]]) -> None:
        start = int(threshold_for(self.schedule.retention)[0])
        for threshold, curve in zip(self.thresholds, curves, strict=False):
            if threshold[0] == start:  # it has not moved
                threshold[:] = threshold_for(self.schedule.retention, curve)

    def count_ahead(self, layer: int, num_layers: int, named: int) -> tuple[int, int]:
        """High for as many as the coming layer's t says (Eqs. 5, 7 and 8), or retention; the others low, or not."""
        if self.thresholds:
            high = min(named, max(1, round(self.schedule.retention * named)))
        else:
            high = self._critical(layer, num_layers, named)
        return high, high if self.high_ahead else named

    def _critical(self, layer: int, num_layers: int, active: int) -> int:
        return self.schedule.critical(layer, num_layers, active)


class Dymoe(Exact):
    """High for the critical experts of a step, low for the others; kept and predicted as by ``exact``."""

    name: ClassVar[str] = "dymoe"
    summary: ClassVar[str] = "DyMoE: experts that matter to the step at `high`, the others at `low`"
    default_low: ClassVar[int] = 2
    precision_parameters: ClassVar[tuple[str, ...]] = (
        "retention",
        "high_by",
        "heavy_share",
        "rounding",
        "skipped_weights",
    )

    retention: float = Field(default=0.75, ge=0, le=1)
    """r: the average share of a layer's active experts that stay high."""
    high_by: Literal["threshold", "depth", "equal"] = "threshold"
    """What makes an expert high: a routing weight above one threshold for all layers; or it is among the largest of its
    layer, fewer the deeper it lies (Eq. 4), or equally many everywhere."""
    heavy_share: float = Field(default=1, gt=0, le=1)
    """Share of a prompt's tokens that count, those that attention dwells on (heavy hitters)."""
    rounding: Literal["up", "nearest"] = "up"
    """Of the number of high experts where no threshold decides (Eq. 5: up)."""
    skipped_weights: Literal["keep", "renormalize"] = "keep"
    """Weights of skipped experts: lost, or handed to the token's others."""
    ahead: Literal["all", "high"] = "all"
    """Which predicted experts are fetched: all, or only those that will be high (the paper)."""
    reuse_high: bool = True
    """Whether a low expert is computed high where its high version is on the device."""

    _around: tuple[int, int] = PrivateAttr((0, 0))  # MoE layers of other stages

    def of_stage(self, before: int, behind: int) -> "Dymoe":
        placed = type(self)(**{name: getattr(self, name) for name in type(self).model_fields})  # and not its precision
        placed._around = before, behind
        return placed

    @cached_property
    def precision(self) -> CriticalHigh:
        """Both precisions, or only one at the two ends of the scale, where there is nothing to choose."""
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
