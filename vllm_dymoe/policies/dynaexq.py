"""DynaExq: every expert is resident in some version (3.1 to 3.5).

The most used ones are resident in the high version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies.base import Migrating, Policy, PrecisionPolicy, ResidencyPolicy


@dataclass(frozen=True)
class AsResident(PrecisionPolicy):
    """Wants every expert low; one whose high version is resident is computed high."""

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        return {Precision.HIGH: [0.0] * num_layers, Precision.LOW: [1.0] * num_layers}

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        return np.zeros((num_layers, experts + 1), np.int32)

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        return dict.fromkeys(routing.active, Precision.LOW)


class DynaExq(Migrating, Policy):
    """Serves the resident version of every expert."""

    name: ClassVar[str] = "dynaexq"
    summary: ClassVar[str] = "DynaExq: every expert resident, the hottest at `high`, the others at `low`; no step waits"

    @cached_property
    def precision(self) -> PrecisionPolicy:
        return AsResident(frozenset((Precision.HIGH, Precision.LOW)))

    @cached_property
    def residency(self) -> ResidencyPolicy:
        """Versions move between steps, by the parameters of ``Migrating``."""
        return ResidencyPolicy(migrating=Migrating(**{name: getattr(self, name) for name in Migrating.model_fields}))
