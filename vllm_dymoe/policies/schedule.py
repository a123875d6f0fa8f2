"""The number of critical experts of a layer, by depth (DyMoE 4.3, Eqs. 4 and 5).

``r(l) = (1 - lambda) * (cos(pi * l / (L - 1)) + 1) / 2 + lambda``: every expert of the first layer, lambda of the last.
The cosines of the layers cancel in pairs, so r(l) averages exactly (1 + lambda) / 2 over any number of layers, and
lambda = 2r - 1 gives an average retention r. The paper's lambda from 0 to 1 covers r from 0.5 to 1. For a lower r we
keep lambda at 0 and scale the curve by 2r.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Rounding = Literal["up", "nearest"]

# Tolerance for rounding up: below any real difference of r * M, above float64 rounding errors.
_EPSILON = 1e-9


@dataclass(frozen=True)
class Schedule:
    """Number of critical experts by depth.

    The paper does not define M of Eq. 5. Here it is the number of experts that the step activates in the layer. If it
    were all experts of the layer, every expert of a decode step would be critical as soon as r(l) * M reaches top-k: at
    the paper's r = 0.75 in every layer of Mixtral and of Qwen3-30B-A3B, so nothing would ever be low. Raises ValueError
    if retention is not within 0 to 1.
    """

    retention: float  # r, the average of r(l) over the layers, 0 to 1
    rounding: Rounding = "up"
    """"up" is Eq. 5's ceiling, which makes the share of critical experts exceed r if few are active; "nearest" stays
    close to r. If there are two precisions, at least one expert is high: a layer without any costs the most quality.
    """
    depth: bool = True  # Eq. 4; otherwise every layer has r
    before: int = 0  # layers of the model before the first one counted here, for pipeline stages
    behind: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention is {self.retention}, but it is a share from 0 to 1")

    def ratio(self, layer: int, num_layers: int) -> float:
        """Return r(l), the share of critical experts at a depth (Eq. 4).

        A single layer has r itself.
        """
        layer, num_layers = layer + self.before, num_layers + self.before + self.behind
        if num_layers == 1 or not self.depth:
            return self.retention
        depth = min(1.0, layer / (num_layers - 1))  # a draft's layers come after the last
        curve = (math.cos(math.pi * depth) + 1) / 2
        floor = max(0.0, 2 * self.retention - 1)  # lambda
        return min(1.0, 2 * self.retention) * ((1 - floor) * curve + floor)

    def critical(self, layer: int, num_layers: int, active: int) -> int:
        """Return t_l, the number of critical experts among ``active`` ones (Eq. 5)."""
        return _critical(self, layer, num_layers, active)


@lru_cache(1 << 14)  # called for every layer of every step
def _critical(schedule: Schedule, layer: int, num_layers: int, active: int) -> int:
    exact = schedule.ratio(layer, num_layers) * active
    rounded = math.ceil(exact - _EPSILON) if schedule.rounding == "up" else math.floor(exact + 0.5 + _EPSILON)
    return min(active, max(schedule.retention > 0, rounded))
