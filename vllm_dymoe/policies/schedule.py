"""How many experts of a layer stay critical, by depth (DyMoE 4.3, Eqs. 4 and 5).

``r(l) = (1 - lambda) * (cos(pi * l / (L - 1)) + 1) / 2 + lambda``: every expert of the first layer, lambda of the last.
The cosines of the layers cancel in pairs, so that r(l) averages exactly (1 + lambda) / 2 over any number of layers, and
lambda = 2r - 1 gives an average retention r. The paper has lambda from 0 to 1, which is r from 0.5 to 1. For a lower r
lambda stays 0 and the whole curve is scaled by 2r: that is ours.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Rounding = Literal["up", "nearest"]

# Below what any r * M differs by on purpose, above what float64 leaves of a whole number.
_EPSILON = 1e-9


@dataclass(frozen=True)
class Schedule:
    """Critical experts by depth; ValueError if retention is outside of 0 to 1.

    M of Eq. 5, which the paper does not define, is the number of experts that the step activates in the layer. With all
    experts of the layer in its place every expert of a decode step would be critical as soon as r(l) * M reaches top-k:
    at the paper's r = 0.75 that is every layer of Mixtral and of Qwen3-30B-A3B, and nothing would ever be low.
    """

    retention: float  # r, the average of r(l) over the layers, 0 to 1
    rounding: Rounding = "up"
    """With "up" it is Eq. 5's ceiling, and the share of critical experts above r where few are active; "nearest" stays
    around r. Of two precisions at least one expert is high: a layer without any costs the most."""
    depth: bool = True  # Eq. 4; else every layer has r.
    before: int = 0  # layers of the model in front of those that are counted here, as in a stage of a pipeline
    behind: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.retention <= 1:
            raise ValueError(f"retention is {self.retention}, but it is a share from 0 to 1")

    def ratio(self, layer: int, num_layers: int) -> float:
        """r(l), Eq. 4: the share of critical experts at a depth. A single layer has r itself."""
        layer, num_layers = layer + self.before, num_layers + self.before + self.behind
        if num_layers == 1 or not self.depth:
            return self.retention
        depth = min(1.0, layer / (num_layers - 1))  # a draft's layers lie behind the last
        curve = (math.cos(math.pi * depth) + 1) / 2
        floor = max(0.0, 2 * self.retention - 1)  # lambda
        return min(1.0, 2 * self.retention) * ((1 - floor) * curve + floor)

    def critical(self, layer: int, num_layers: int, active: int) -> int:
        """t_l, Eq. 5: how many of the ``active`` experts of a step are critical."""
        return _critical(self, layer, num_layers, active)


@lru_cache(1 << 14)  # asked for every layer of every step
def _critical(schedule: Schedule, layer: int, num_layers: int, active: int) -> int:
    exact = schedule.ratio(layer, num_layers) * active
    rounded = math.ceil(exact - _EPSILON) if schedule.rounding == "up" else math.floor(exact + 0.5 + _EPSILON)
    return min(active, max(schedule.retention > 0, rounded))
