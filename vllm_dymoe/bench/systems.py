"""Systems that exist to be compared: parts of the papers' systems, one at a time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from vllm_dymoe.predict import Predictor, RoutedModel
from vllm_dymoe.predict.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems import SYSTEMS, System
from vllm_dymoe.systems.base import Foresight, Precision
from vllm_dymoe.systems.dymoe import CriticalHigh, Dymoe
from vllm_dymoe.systems.exact import Exact


class Compared(Exact):
    """Every expert high, with parts of FIRM-MoE."""

    name: ClassVar[str] = "compared"
    summary: ClassVar[str] = "parts of systems, for measurements"

    ahead: Literal["next gate", "meeting of layers"] = "next gate"
    """What names experts of the next layer."""
    projections: int = Field(default=3, ge=1, le=3)
    """FIRM-MoE's n."""
    k: int | None = Field(default=None, ge=1)
    """Experts that each layer names; as many as a token uses if None."""
    p: int = Field(default=3, ge=1)
    """Layers that meet."""

    @cached_property
    def foresight(self) -> Foresight:
        """A meeting may have as many on their way as it names, so that K decides what is fetched, and not the slots."""
        return Foresight(
            self.ahead,
            self._compared,
            needs_gates=True,
            takes_predictor=True,
            paced=True,
            projections=self.projections,
            wide=lambda top_k: 0 if self.ahead == "next gate" else self.k or top_k,
        )

    def _compared(self, model: RoutedModel) -> Predictor:
        if self.ahead == "next gate" or model.predictor is not None:
            return self._predictor(model)
        return MeetingOfLayers(
            model.gates, self.k or model.top_k, self.p, held=model.held, side_stream=make_side_stream(model.device)
        )


@dataclass(frozen=True)
class RandomHigh(CriticalHigh):
    """High for as many as the schedule says, by a fixed sequence of random numbers."""

    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def critical(self, routing: Routing) -> set[int]:
        count = self.schedule.critical(routing.layer, routing.num_layers, len(routing.active))
        return set(self.draw.sample(routing.active, count))


class Chosen(Dymoe):
    """DyMoE without its idea of what matters (its Figure 3)."""

    name: ClassVar[str] = "chosen"
    summary: ClassVar[str] = "DyMoE with other choices, for measurements"

    by_importance: bool = True
    """Which experts are critical; else a fixed sequence of random numbers says."""

    @cached_property
    def precision(self) -> CriticalHigh:
        """DyMoE's, or a random one."""
        return super().precision if self.by_importance else RandomHigh(**vars(super().precision))


@dataclass(frozen=True)
class LayerLow(Precision):
    """Every expert of one layer low, every other one high."""

    layer: int = 0

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        low = [float(layer == self.layer) for layer in range(num_layers)]
        return {Tier.HI: [1 - share for share in low], Tier.LO: low}

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        return dict.fromkeys(routing.active, Tier.LO if routing.layer == self.layer else Tier.HI)


class OneLayerLow(System):
    """Every expert of one layer low, every other one high (DyMoE's Figure 5)."""

    name: ClassVar[str] = "one layer low"
    summary: ClassVar[str] = "all experts of one layer at `lo`, for measurements"

    layer: int = Field(ge=0)
    """Which, counted among the MoE layers."""

    @cached_property
    def precision(self) -> Precision:
        """Both tiers."""
        return LayerLow(frozenset((Tier.HI, Tier.LO)), layer=self.layer)


def make_known() -> None:
    """Let the option ``system`` name them, in this process."""
    SYSTEMS.update({system.name: system for system in (Compared, Chosen, OneLayerLow)})
