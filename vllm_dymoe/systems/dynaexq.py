"""DynaExq: every expert is there in some version, those that traffic dwells on in the high one (3.1 to 3.5).

Nothing is fetched when a router asks. What is high follows windows of traffic, and moves between steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.base import Migrating, Precision, Residency, System

_HOT = 0.25
"""Of the experts that stay where others are streamed, the share that is high: a quarter has half of the traffic."""


@dataclass(frozen=True)
class _AsResident(Precision):
    """Low will do: an expert whose high version is there is computed high."""

    hot: float = 0.0  # share that is wanted high all the same

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        return {Tier.HI: [self.hot] * num_layers, Tier.LO: [1 - self.hot] * num_layers}

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        return np.zeros((num_layers, experts + 1), np.int32)

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        return dict.fromkeys(routing.active, Tier.LO)


class DynaExq(System):
    """The version that is resident serves."""

    name: ClassVar[str] = "dynaexq"
    summary: ClassVar[str] = "DynaExq: every expert there, the hottest at `hi`, the others at `lo`, and no waiting"

    hotness: Literal["squared_gates", "uses"] = "squared_gates"
    """What makes an expert hot: the squares of its shares of tokens' routing weights, which the error of a low version
    follows, or its uses, as the paper has it."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Weight of the last window in an expert's hotness."""
    window_s: NonNegativeFloat = 2
    """Seconds of a window, after which high experts are chosen anew."""
    window_uses: PositiveFloat = 16
    """Uses that experts have in a window on average; one with fewer goes on."""
    margin: NonNegativeFloat = 0.1
    """How much hotter an expert must be to take another one's place, in even shares of a layer's traffic."""
    in_flight: PositiveInt = 2
    """Experts that are moved at the same time; more, within link_share, where versions are nested and need no slots."""
    link_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the time that the link may work for moves."""
    layer_worth: tuple[PositiveFloat, ...] = ()
    """What high versions are worth in each layer beside the others; measured while serving if empty."""
    popularity: Path | None = None
    """A trace: at start its most popular experts are high, and layers have places by what these bring."""
    stream_cold: bool = False
    """Whether a budget that cannot hold every low version is served all the same, by fetching while requests wait."""

    @cached_property
    def precision(self) -> Precision:
        return _AsResident(frozenset((Tier.HI, Tier.LO)), hot=_HOT if self.stream_cold else 0.0)

    @cached_property
    def residency(self) -> Residency:
        """Where every expert is there nothing is left for a device to decide."""
        migrating = Migrating(
            alpha=self.alpha,
            margin=self.margin,
            window_seconds=self.window_s,
            window_uses=self.window_uses,
            in_flight=self.in_flight,
            link_share=self.link_share,
            by_gates=self.hotness == "squared_gates",
            worth=self.layer_worth,
            trace=self.popularity,
            streams=self.stream_cold,
        )
        return Residency(on_device=not self.stream_cold, migrating=migrating)
