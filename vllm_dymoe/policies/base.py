"""What a policy decides, in three parts: precision, residency and prefetch. A policy is a frozen pydantic model: its
fields are its parameters, the option ``policy_options`` by name. It touches no table, no slot and no byte."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts
from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.planner.constants import Eviction
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.planner.rule import Ints
from vllm_dymoe.prefetch import Predictor, RoutedModel

# Two slots keep a link busy within a layer: one is computed while the other fills. From a layer's last transfer to the
# first of the next it idles unless predictions have slots: four where the host takes 300 us for a layer and the link 84
# us for an expert, more while attention computes a long prompt. In a prompt experts that have arrived are computed in
# one
# call: two slots are 127 calls for a layer of Qwen3-30B-A3B, 16 are 18. An eighth of the slots, or a 64th of many, is
# so little that layers hardly feel what they cannot keep.
FEWEST_STAGING = 2
_MOST_AT_ONCE = 1 << 16  # moves that a user may ask for; no model has more experts in a layer to move
_MOST_IN_FLIGHT = 64  # moves without slots of their own, however idle the link
_USUAL_STAGING, _MOST_STAGING = 4, 16


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision of each expert. This one serves every expert high."""

    precisions: frozenset[Precision] = frozenset(
        (Precision.HIGH,)
    )  # that ``select`` can answer with; there are slots for no others
    heavy_hitters: float | None = None
    """Share of a prompt's tokens to mark as heavy hitters; None where precision ignores them."""
    reuses_high: bool = True  # an expert that is wanted low is computed high where its high version is on the device
    renormalizes: bool = False
    """Routing weights of skipped experts go to the token's other experts; otherwise they are lost."""
    thresholds: tuple[Ints, ...] = field(default=(), compare=False)
    """Above which experts of prompts' tokens and of others are high, int64 [2] each, see
    :mod:`~vllm_dymoe.planner.threshold`; where the host plans they move. Empty where there are none."""

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        """What share of a layer's active experts gets each precision when one token is decoded, for every layer."""
        return {Precision.HIGH: [1.0] * num_layers}

    def all_shares(self, experts: ModelExperts) -> Mapping[Precision, Sequence[float]]:
        """``shares`` of a model and its draft, whose layers get what the model's last one gets; NotImplementedError if
        there is a precision of which ``shares`` says nothing."""
        shares = self.shares(len(experts.layers) - experts.draft_layers, experts.top_k)
        if missing := self.precisions - shares.keys():
            names = " and ".join(sorted(precision.value for precision in missing))
            raise NotImplementedError(
                f"{type(self).__name__} serves experts in the {names} precision, but its shares() do not say how "
                f"many, and "
                "without that no slots can be shared out; override shares() together with precisions."
            )
        return {precision: [*layers, *[layers[-1]] * experts.draft_layers] for precision, layers in shares.items()}

    link_share: float | None = None
    """Share of the time that steps may wait for the link, which thresholds are moved for; None for no such share."""

    planned: ClassVar[bool] = True
    """Whether ``critical_counts`` and ``thresholds`` say all that ``select`` does, so that a planner can choose."""

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        """A precision for each active expert of a layer; called once for every MoE layer of every step."""
        return dict.fromkeys(routing.active, Precision.HIGH)

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """For a planner: how many experts of a step are high, int32 [num_layers, experts + 1], by layer and number of
        active experts. The most important by :func:`~.importance.Importance` are."""
        return np.tile(np.arange(experts + 1, dtype=np.int32), (num_layers, 1))

    def all_critical_counts(self, experts: ModelExperts) -> NDArray[np.int32]:
        """``critical_counts`` of a model and its draft, whose layers get what the model's last one gets."""
        counts = self.critical_counts(len(experts.layers) - experts.draft_layers, experts.num_experts)
        return np.concatenate([counts, np.repeat(counts[-1:], experts.draft_layers, axis=0)])

    def begin(self, curves: Sequence[Sequence[float]]) -> None:
        """Thresholds that have not moved begin where those of a calibration ended; none where there was no such."""

    def count_ahead(self, layer: int, num_layers: int, named: int) -> tuple[int, int]:
        """Of so many experts that a predictor names for a coming layer, the best first, how many are fetched high, and
        how many at all."""
        return named if Precision.HIGH in self.precisions else 0, named

    def precisions_ahead(self, layer: int, num_layers: int, named: Sequence[int]) -> Mapping[int, Precision]:
        """In which precision to fetch the experts that a predictor names for a coming layer, the best first; those that
        are left out are not fetched."""
        high, fetched = self.count_ahead(layer, num_layers, len(named))
        return {e: Precision.HIGH if place < high else Precision.LOW for place, e in enumerate(named[:fetched])}

    def counts_ahead(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """``count_ahead`` for a device, int32 [2, num_layers, experts + 1]."""
        counts = [[self.count_ahead(layer, num_layers, n) for n in range(experts + 1)] for layer in range(num_layers)]
        return np.array(counts, np.int32).transpose(2, 0, 1)


Evicts = Literal["coldest", "least recent", "first in"]
"""Which expert of a layer leaves first: the value of a parameter of that name."""
EVICTIONS: Mapping[Evicts, Eviction] = {
    "coldest": Eviction.COLDEST, "least recent": Eviction.LEAST_RECENT, "first in": Eviction.FIRST_IN
}  # fmt: skip
_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Migrating(BaseModel):
    """How the high set of a policy that moves versions between steps follows traffic."""

    model_config = _FROZEN

    hotness: Literal["squared_gates", "uses"] = "squared_gates"
    """What makes an expert hot: its squared routing weights, with what its low version loses where that was measured,
    or uses (the paper)."""
    high_set: Literal["model", "layer"] = "model"
    """Whether experts compete for high versions with all of the model, each layer's by what it changes, or with their
    own layer's (the paper)."""
    alpha: float = Field(default=0.85, gt=0, le=1)
    """Weight of the last window in hotness."""
    window_s: NonNegativeFloat = 2
    """Seconds of a window, after which high experts are chosen anew."""
    window_uses: PositiveFloat = 16
    """Least uses of an expert in a window, on average."""
    margin: NonNegativeFloat = 0.1
    """How much hotter an expert must be to take a place, in even shares of a layer's traffic."""
    in_flight: int = Field(default=2, ge=1, le=_MOST_AT_ONCE)
    """Experts that are moved at the same time; more, within link_share, where versions are nested."""
    link_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the time that the link may work for moves."""

    @property
    def by_gates(self) -> bool:
        """An expert is as hot as its squared gates add up to; else as its uses."""
        return self.hotness == "squared_gates"

    def at_once(self, seconds: float, each: float) -> int:
        """How many moves may be on their way while the link has so many seconds for them, and each takes so many; 0
        where it needs slots, or none has arrived yet.

        Where one needs no slot of its own they are as many as there is time for: moves begin between steps, and two in
        each would take a large model hundreds of steps to follow its traffic.
        """
        return max(self.in_flight, min(_MOST_IN_FLIGHT, int(seconds / each))) if each else self.in_flight


@dataclass(frozen=True)
class ResidencyPolicy:
    """What stays on the device. Data for every planner; see :attr:`Policy.needs_host` for what a device's cannot do."""

    keeps: bool = True  # layers keep experts for later steps
    overlaps: bool = True  # experts arrive while others are computed
    evicts: Eviction = Eviction.COLDEST
    whole: bool = False  # an expert is computed when all of it is there; else projection by projection
    migrating: Migrating | None = None
    """How versions move between steps, so that every expert is there; None where steps fetch what they need."""
    rescues: bool = False  # where versions move between steps, steps fetch some high ones nevertheless


@dataclass(frozen=True)
class PrefetchPolicy:
    """What names experts before their router does."""

    name: str  # in two or three words for people
    make: Callable[[RoutedModel], Predictor]
    """The predictor for a model; raises PredictorError if a trained one was given and cannot be used."""
    layers: int = 1  # ahead that the predictor is asked about
    needs_gates: bool = False  # the predictor asks the model's gates
    takes_predictor: bool = False  # a trained predictor can stand in for it
    first_layer: bool = False  # experts of a prompt's first MoE layer are named before it is reached
    paced: bool = False  # predictions are acted on only as often as they pay
    needs_predictor: bool = False  # there has to be a trained one
    projections: int = len(EVERY_PROJECTION)
    """How many of an expert's three are fetched ahead, in the order gate, up, down."""
    wide: Callable[[int], int] = lambda top_k: 0
    """Experts to have on their way at once for so many per token; 0 for the usual number."""


class Policy(BaseModel):
    """One way of serving experts. This one serves every expert high, keeps experts and predicts nothing."""

    model_config = _FROZEN

    name: ClassVar[str]
    """As the option ``policy`` has it."""
    summary: ClassVar[str]
    """What it does and where it comes from, in a line for people."""
    default_budget: ClassVar[ExpertBudget | None] = None
    """The budget if the user sets none; None for an automatic one."""
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = None
    """Where packed experts live if the user does not say; None for what there is room for."""
    default_low: ClassVar[int] = 0
    """Bits of the low precision if the user does not say."""
    precision_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters that decide precision, and can change while the model is served."""

    def of_stage(self, before: int, behind: int) -> "Policy":
        """The same for a stage of a pipeline, with so many MoE layers before its own and behind them."""
        return self

    @cached_property
    def precision(self) -> PrecisionPolicy:
        return PrecisionPolicy()

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy()

    @cached_property
    def prefetch(self) -> PrefetchPolicy | None:
        return None

    @property
    def needs_host(self) -> str:
        """Why a device cannot plan this policy's steps, to follow "because"; empty if it can.

        A device's planner has quotas (none where layers keep nothing), admission by score, precision by thresholds or
        counts, and streaming. It runs no Python.
        """
        if not self.precision.planned:
            return f'policy "{self.name}" chooses precisions by code that runs on the host'
        return ""

    def staging_slots(self, slots: int) -> int:
        """Of a precision's slots, how many no layer keeps: for streaming, and for what is fetched ahead."""
        if not self.residency.keeps:
            return slots
        usual = max(FEWEST_STAGING, min(_USUAL_STAGING, slots // 8))
        return min(max(usual, slots // 64), _MOST_STAGING, slots)


class PolicyOptionError(ValueError):
    """An option, by name, that a policy cannot honour; the message is what is wrong and what to do."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason)
        self.option = option
