"""What a system decides: the precision of experts, which of them stay, and which are fetched before a router asks.

A system is a frozen pydantic model: its fields are its parameters, the option ``system_options`` by name. It touches no
table, no slot and no byte. What is here holds for one that serves every expert high, keeps experts and foresees
nothing; a system says where it differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from vllm_dymoe.config import ExpertBudget
from vllm_dymoe.predict import Predictor, RoutedModel
from vllm_dymoe.residency.format import EVERY_PROJECTION, ModelExperts
from vllm_dymoe.residency.hotness import Rule
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.pace import Pace, Unpaced

# Two slots keep a link busy within a layer: one is computed while the other fills. From a layer's last transfer to the
# first of the next it idles unless guesses have slots: four where the host takes 300 us for a layer and the link 84 us
# for an expert, more while attention computes a long prompt. An eighth of the slots, or a 64th of many, is so little
# that layers hardly feel what they cannot keep (benchmarks/staging).
FEWEST_STAGING = 2
_USUAL_STAGING, _MOST_STAGING = 4, 16


@dataclass(frozen=True)
class Migrating:
    """How the high set of a system follows traffic.

    Attributes:
        rule: who is to be high.
        window_seconds: after which that is asked anew.
        window_uses: that experts have had on average by then, or the window goes on.
        in_flight: moves at the same time.
        link_share: of the time, that the link may work for moves.
        worth: what a high expert takes away in each layer, beside the others; empty if that is not known.
        trace: whose most popular experts are high at start.
        streams: a budget that cannot hold every expert is served by fetching.
    """

    rule: Rule
    window_seconds: float
    window_uses: float
    in_flight: int
    link_share: float
    worth: tuple[float, ...]
    trace: Path | None
    streams: bool


class System(BaseModel):
    """One way of serving experts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ClassVar[str]
    """As the option ``system`` has it."""
    summary: ClassVar[str]
    """What it does and where it comes from, in a line for people."""
    default_budget: ClassVar[ExpertBudget | None] = None
    """The budget if the user sets none; None for an automatic one."""
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = None
    """Where packed experts live if the user does not say; None for what there is room for."""
    keeps_experts: ClassVar[bool] = True
    """Whether layers keep experts for later steps."""
    precision_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters that decide precision, and can change while the model is served."""

    # -- precision --------------------------------------------------------------------------------

    @property
    def tiers(self) -> frozenset[Tier]:
        """Tiers that ``select`` can answer with; there are slots for no others."""
        return frozenset((Tier.HI,))

    @property
    def heavy_hitters(self) -> float | None:
        """Share of a prompt's tokens that are to be marked as heavy hitters; None if nobody asks for them."""
        return None

    @property
    def reuses_high(self) -> bool:
        """Whether an expert that is wanted low is computed high where its high version is on the device."""
        return True

    @property
    def renormalizes(self) -> bool:
        """Whether routing weights of skipped experts are handed to the token's other experts, or lost."""
        return False

    def shares(self, num_layers: int, top_k: int) -> Mapping[Tier, Sequence[float]]:
        """What share of a layer's active experts gets each tier when one token is decoded, for every layer."""
        return {Tier.HI: [1.0] * num_layers}

    def all_shares(self, experts: ModelExperts) -> Mapping[Tier, Sequence[float]]:
        """``shares`` of a model and its draft, whose layers get what the model's last one gets.

        Raises:
            NotImplementedError: the system has a tier of which ``shares`` says nothing.
        """
        own = len(experts.layers) - experts.draft_layers
        shares = self.shares(own, experts.top_k)
        if missing := self.tiers - shares.keys():
            names = " and ".join(sorted(tier.value for tier in missing))
            raise NotImplementedError(
                f'system "{self.name}" serves experts in the {names} tier, but its shares() do not say how many, and '
                "without that no slots can be shared out; override shares() together with tiers."
            )
        return {tier: [*layers, *[layers[-1]] * experts.draft_layers] for tier, layers in shares.items()}

    def select(self, routing: Routing) -> Mapping[int, Tier]:
        """A tier for each active expert of a layer; called once for every MoE layer of every step."""
        return dict.fromkeys(routing.active, Tier.HI)

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """Where devices decide: how many experts of a decode step are high, int32 [num_layers, experts + 1], by layer
        and number of active experts. The most important by :func:`~.importance.step_importance` are."""
        return np.tile(np.arange(experts + 1, dtype=np.int32), (num_layers, 1))

    def tiers_ahead(self, layer: int, num_layers: int, named: Sequence[int]) -> Mapping[int, Tier]:
        """In which tier a coming layer will want experts.

        Args:
            layer: the coming one.
            num_layers: of the model.
            named: experts that a predictor names for it, the best first.
        """
        return dict.fromkeys(named, Tier.HI if Tier.HI in self.tiers else Tier.LO)

    def warnings(self, num_layers: int, top_k: int) -> Sequence[str]:
        """Sentences about parameters that work, but badly, for a model with so many layers and experts of a token."""
        return ()

    # -- residency and transfers ------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        """Whether experts arrive while others are computed."""
        return True

    @property
    def projections_ahead(self) -> int:
        """How many of an expert's three projections are fetched ahead, in the order gate, up, down."""
        return len(EVERY_PROJECTION)

    def staging_slots(self, slots: int) -> int:
        """Of a tier's slots, how many no layer keeps: for streaming, and for what is fetched ahead."""
        if not self.keeps_experts:
            return slots
        if self.foresight is None:
            return min(FEWEST_STAGING, slots)
        usual = max(FEWEST_STAGING, min(_USUAL_STAGING, slots // 8))
        return min(max(usual, slots // 64), _MOST_STAGING, slots)

    def named_ahead(self, top_k: int) -> int:
        """Experts that are to be on their way at once before a router asks, beyond what is usual."""
        return 0

    @property
    def decides_on_device(self) -> bool:
        """Whether a device can decide a decode step by itself: ``critical_counts`` says all that ``select`` would."""
        return False

    @property
    def projections_in_graph(self) -> int:
        """Projections that a decode step which the device decides fetches ahead for the next layer at most."""
        return 0

    @property
    def migrating(self) -> Migrating | None:
        """How versions move between steps where every expert is there; None where steps fetch what they need."""
        return None

    # -- foresight --------------------------------------------------------------------------------

    @property
    def foresight(self) -> str | None:
        """What names experts ahead, in two or three words for people; None if nothing does."""
        return None

    @property
    def foresees_first_layer(self) -> bool:
        """Whether experts of a prompt's first MoE layer are named before it is reached, by the predictor."""
        return False

    @property
    def needs_gates(self) -> bool:
        """Whether the predictor that the system makes asks the model's gates."""
        return False

    @property
    def takes_predictor(self) -> bool:
        """Whether a trained predictor can stand in for the one that the system makes."""
        return False

    def make_predictor(self, model: RoutedModel) -> Predictor | None:
        """What names experts ahead in a model; None if nothing does.

        Raises:
            PredictorError: a trained one was given and cannot be used.
        """
        return None

    def make_pace(self) -> Pace:
        """What decides how often predictions are acted on, one for each phase."""
        return Unpaced()


class SystemOptionError(ValueError):
    """An option that a system cannot honour; the message is what is wrong and what to do.

    Attributes:
        option: its name, for whoever knows where it was written.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason)
        self.option = option
