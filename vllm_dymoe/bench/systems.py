"""Systems that exist to be compared: parts of the papers' systems, one at a time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, PrivateAttr

from vllm_dymoe.predict import Predictor, RoutedModel
from vllm_dymoe.predict.all_experts import AllExperts
from vllm_dymoe.predict.meeting_of_layers import MeetingOfLayers, Votes
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.predict.tuner import Heop, Setting
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems import SYSTEMS, System
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.systems.pace import Pace, Unpaced
from vllm_dymoe.systems.schedule import Schedule

Ahead = Literal["next gate", "meeting of layers", "union", "weighted voting", "popularity", "layer"]

_LAYER_WEIGHTS = (1.5, 1.0, 0.5)  # of weighted voting, the nearest layer's first (FIRM-MoE Figure 7)


class Compared(Exact):
    """Every expert high, with one of the predictors and FIRM-MoE's numbers."""

    name: ClassVar[str] = "compared"
    summary: ClassVar[str] = "parts of systems, for measurements"

    ahead: Ahead = "next gate"
    """What names experts of the next layer."""
    projections: int = Field(default=3, ge=1, le=3)
    """FIRM-MoE's n."""
    k: int | None = Field(default=None, ge=1)
    """Experts that each layer names; as many as a token uses if None."""
    p: int = Field(default=3, ge=1)
    """Layers that meet."""
    threshold: float = 3.0
    """Votes that an expert needs where votes are weighted."""
    tune: bool = False
    """Whether HEOP changes K and P of a meeting of layers, in half of the paper's steps."""

    @property
    def projections_ahead(self) -> int:
        """As the parameter says."""
        return self.projections

    def named_ahead(self, top_k: int) -> int:
        """As many as a meeting may name, so that K decides what is fetched, and not the slots."""
        return 0 if self.ahead == "next gate" else 2 * top_k if self.tune else self.k or top_k

    def make_predictor(self, model: RoutedModel) -> Predictor | None:
        """The one that is asked for; a trained one stands in for any."""
        side_stream = make_side_stream(model.device)
        if self.ahead == "next gate" or model.predictor is not None:
            return super().make_predictor(model)
        if self.ahead == "popularity":
            return Popularity(model.num_layers, model.num_experts, model.top_k)
        if self.ahead == "layer":
            return AllExperts(model.num_layers, model.num_experts)
        start = Setting(self.k or model.top_k, self.p)
        tuner = None
        if self.tune:
            tuner = Heop(model.num_layers, start, Setting(2 * model.top_k, 2 * self.p), update_every=4, rounds=16)
        return MeetingOfLayers(model.gates, *start, tuner, model.hits, side_stream, votes=self.votes)

    @property
    def votes(self) -> Votes | None:
        """How layers vote; None where all have to agree."""
        if self.ahead == "union":
            return Votes((1.0,) * self.p, 1.0)
        return Votes(_LAYER_WEIGHTS, self.threshold) if self.ahead == "weighted voting" else None

    def make_pace(self) -> Pace:
        """HEOP is a controller already."""
        return Unpaced() if self.tune else super().make_pace()


class ComparedAlone(Compared):
    """The same without a cache: as many slots as the budget has, and nothing stays."""

    name: ClassVar[str] = "compared alone"
    keeps_experts: ClassVar[bool] = False


@dataclass(frozen=True)
class EqualSchedule(Schedule):
    """The same share of critical experts at every depth, in place of Eq. 4."""

    def ratio(self, layer: int, num_layers: int) -> float:
        """r itself."""
        return self.retention


class Chosen(Dymoe):
    """DyMoE with one or both of its ideas taken out (its Figure 3)."""

    name: ClassVar[str] = "chosen"
    summary: ClassVar[str] = "DyMoE with other choices, for measurements"

    by_importance: bool = True
    """Which experts are critical; else a fixed sequence of random numbers says."""
    by_depth: bool = True
    """How many of a layer are, by Eq. 4; else as many in every layer."""
    _random: random.Random = PrivateAttr(default_factory=lambda: random.Random(0))

    @property
    def schedule(self) -> Schedule:
        """By depth, or not."""
        return super().schedule if self.by_depth else EqualSchedule(self.retention, self.rounding)

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert."""
        if self.by_importance:
            return super().select(routing)
        critical = self.schedule.critical(routing.layer, routing.num_layers, len(routing.active))
        high = set(self._random.sample(routing.active, critical))
        return {expert: Tier.HI if expert in high else Tier.LO for expert in routing.active}


class OneLayerLow(System):
    """Every expert of one layer low, every other one high (DyMoE's Figure 5)."""

    name: ClassVar[str] = "one layer low"
    summary: ClassVar[str] = "all experts of one layer at `lo`, for measurements"

    layer: int = Field(ge=0)
    """Which, counted among the MoE layers."""

    @property
    def tiers(self) -> frozenset[Tier]:
        """Both."""
        return frozenset((Tier.HI, Tier.LO))

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """All of a layer's experts are in one tier."""
        low = [float(layer == self.layer) for layer in range(num_layers)]
        return {Tier.HI: [1 - share for share in low], Tier.LO: low}

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        """The layer's tier."""
        return dict.fromkeys(routing.active, Tier.LO if routing.layer == self.layer else Tier.HI)


def make_known() -> None:
    """Let the option ``system`` name them, in this process."""
    SYSTEMS.update({system.name: system for system in (Compared, ComparedAlone, Chosen, OneLayerLow)})
