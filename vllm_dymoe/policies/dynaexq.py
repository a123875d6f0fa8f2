"""DynaExq: every expert is there in some version, those that traffic dwells on in the high one (3.1 to 3.5)."""

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
    """Low will do: an expert whose high version is there is computed high."""

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        return {Precision.HIGH: [0.0] * num_layers, Precision.LOW: [1.0] * num_layers}

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        return np.zeros((num_layers, experts + 1), np.int32)

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        return dict.fromkeys(routing.active, Precision.LOW)


class DynaExq(Migrating, Policy):
    """The version that is resident serves."""

    name: ClassVar[str] = "dynaexq"
    summary: ClassVar[str] = "DynaExq: every expert there, the hottest at `high`, the others at `low`, and no waiting"

    @cached_property
    def precision(self) -> PrecisionPolicy:
        return AsResident(frozenset((Precision.HIGH, Precision.LOW)))

    @cached_property
    def residency(self) -> ResidencyPolicy:
        """Every expert is there, so that nothing is left for a device to decide."""
        return ResidencyPolicy(migrating=Migrating(**{name: getattr(self, name) for name in Migrating.model_fields}))
