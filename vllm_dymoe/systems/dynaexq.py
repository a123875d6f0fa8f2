"""DynaExq: every expert is there in some version, those that traffic dwells on in the high one (3.1 to 3.5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.base import Migrating, Precision, Residency, System


@dataclass(frozen=True)
class _AsResident(Precision):
    """Low will do: an expert whose high version is there is computed high."""

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        return {Tier.HI: [0.0] * num_layers, Tier.LO: [1.0] * num_layers}

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        return np.zeros((num_layers, experts + 1), np.int32)

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        return dict.fromkeys(routing.active, Tier.LO)


class DynaExq(Migrating, System):
    """The version that is resident serves."""

    name: ClassVar[str] = "dynaexq"
    summary: ClassVar[str] = "DynaExq: every expert there, the hottest at `hi`, the others at `lo`, and no waiting"

    @cached_property
    def precision(self) -> Precision:
        return _AsResident(frozenset((Tier.HI, Tier.LO)))

    @cached_property
    def residency(self) -> Residency:
        """Every expert is there, so that nothing is left for a device to decide."""
        return Residency(on_device=True, migrating=Migrating(**self.model_dump()))
