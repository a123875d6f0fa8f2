"""DynaExq's resident low versions with DyMoE's threshold.

No expert is ever missing, and few steps wait for a high version. Every expert is resident at low and the hottest also
at high, as with ``dynaexq``. An expert without a high version is served low, unless its share of the step's routing
weights, times the number of active experts, exceeds a threshold. Then the high version is streamed for this step, or
executed on the CPU. One parameter, ``wait_share``, sets the share of the time that steps may wait for the link: with 0
no step waits, with 1 every missing high version is fetched. With expert parallelism, weights and active experts are
those of all ranks, but each rank moves its threshold by the time of its own link.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat

from vllm_dymoe.planner.importance import high_of_step
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies.base import PrecisionPolicy, ResidencyPolicy
from vllm_dymoe.policies.dynaexq import AsResident, DynaExq

_START = 1.6  # an even share is 1


@dataclass(frozen=True)
class Rescued(AsResident):
    """High for experts above a threshold, the resident version for the others.

    ``LinkShare`` moves the threshold.
    """

    by_importance: ClassVar[bool] = True

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        high = high_of_step(routing, self.thresholds, lambda active: 0)
        return {expert: Precision.HIGH if expert in high else Precision.LOW for expert in routing.active}


class Adaptive(DynaExq):
    """Serves the resident version, and fetches missing high versions that matter.

    A missing high version matters if its expert has much routing weight.
    """

    name: ClassVar[str] = "adaptive"
    summary: ClassVar[str] = "every expert resident, the hottest at `high`; fetches `high` for large weights"
    default_low: ClassVar[int] = 2

    wait_share: float = Field(default=0.07, ge=0, le=1)
    """Share of the time that steps may wait for the link: 0 is dynaexq, 1 fetches every missing high version."""
    threshold: NonNegativeFloat | None = None
    """Fixed threshold instead of wait_share: a missing high version is fetched if the expert's share of the step's
    routing weights, times the number of active experts, exceeds it.
    """

    @property
    def _never(self) -> bool:
        return self.threshold is None and self.wait_share == 0

    @cached_property
    def precision(self) -> PrecisionPolicy:
        both = frozenset((Precision.HIGH, Precision.LOW))
        if self._never:
            return AsResident(both)
        follows = self.threshold is None and self.wait_share < 1
        start = self.threshold if self.threshold is not None else _START if follows else 0.0
        thresholds = tuple(np.array([int(min(start, 1 << 20) * (1 << 32)), 0], np.int64) for _ in range(2))
        return Rescued(both, thresholds=thresholds, link_share=self.wait_share if follows else None)

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return replace(super().residency, rescues=not self._never)
