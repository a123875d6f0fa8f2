"""The three parts of a policy: precision, residency and prefetch.

A policy is a frozen pydantic model whose fields are the entries of the option ``policy_options``. It never accesses a
table, a slot or an expert's bytes.
"""

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

# Number of staging slots. Two keep the link busy within a layer: one is computed while the other fills. Between a
# layer's last transfer and the next layer's first one the link is idle unless predictions have slots. Four suffice
# where the host needs 300 us for a layer and the link 84 us for an expert; attention over a long prompt leaves time for
# more. In a prompt, experts that have arrived are computed in one call: a layer of Qwen3-30B-A3B takes 127 calls with
# two staging slots, and 18 with 16. An eighth of the slots, or a 64th of many, hardly reduces what layers can keep.
FEWEST_STAGING = 2
_MOST_AT_ONCE = 1 << 16  # upper bound of in_flight; no model has more experts to move
_MOST_IN_FLIGHT = 64  # most concurrent moves where moves need no slots of their own
_USUAL_STAGING, _MOST_STAGING = 4, 16


@dataclass(frozen=True)
class PrecisionPolicy:
    """Chooses the precision of each expert; this base class chooses high for all."""

    precisions: frozenset[Precision] = frozenset(
        (Precision.HIGH,)
    )  # precisions that ``select`` may return; others get no slots
    heavy_hitters: float | None = None
    """Share of a prompt's tokens to mark as heavy hitters; None if precision ignores them."""
    reuses_high: bool = True  # compute an expert that is wanted low from its high version if that is resident
    renormalizes: bool = False
    """Whether routing weights of skipped experts go to the token's other experts; otherwise they are lost."""
    thresholds: tuple[Ints, ...] = field(default=(), compare=False)
    """Thresholds above which experts are high, for tokens of prompts and for decoded tokens: int64 [2] each, see
    :mod:`~vllm_dymoe.planner.threshold`. Steps on a CPU change them in place. Empty if the policy has none.
    """

    def shares(self, num_layers: int, top_k: int) -> Mapping[Precision, Sequence[float]]:
        """Return each precision's expected share of a layer's active experts in decode.

        The value of each precision has one share for every layer.
        """
        return {Precision.HIGH: [1.0] * num_layers}

    def all_shares(self, experts: ModelExperts) -> Mapping[Precision, Sequence[float]]:
        """Return ``shares`` for a model and its draft.

        The draft's layers get the shares of the model's last layer. Raises NotImplementedError if ``shares`` omits a
        precision that is served.
        """
        shares = self.shares(len(experts.layers) - experts.draft_layers, experts.top_k)
        if missing := self.precisions - shares.keys():
            names = " and ".join(sorted(precision.value for precision in missing))
            raise NotImplementedError(
                f"{type(self).__name__} serves experts at {names} precision, but its shares() does not say "
                f"how many; "
                "override shares() together with precisions, so that slots can be allocated."
            )
        return {precision: [*layers, *[layers[-1]] * experts.draft_layers] for precision, layers in shares.items()}

    link_share: float | None = None
    """Share of the time that steps may wait for the link, held by moving the thresholds; None for no limit."""

    by_importance: ClassVar[bool] = False
    """Whether precision depends on how important experts are to a step, so that ranks have to compare all of theirs."""

    planned: ClassVar[bool] = True
    """Whether ``critical_counts`` and ``thresholds`` describe ``select`` completely, so that a planner can choose.

    Otherwise only a CPU can serve the policy: a device runs no Python.
    """

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        """Return a precision for each active expert of a layer.

        Called for every MoE layer of every step.
        """
        return dict.fromkeys(routing.active, Precision.HIGH)

    def critical_counts(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """Return how many experts of a step are high: int32 [num_layers, experts + 1].

        Indices are the layer and the number of active experts; the most important ones by
        :func:`~.importance.Importance` are high. Planners read this instead of calling ``select``.
        """
        return np.tile(np.arange(experts + 1, dtype=np.int32), (num_layers, 1))

    def all_critical_counts(self, experts: ModelExperts, all_experts: int = 0) -> NDArray[np.int32]:
        """Return ``critical_counts`` for a model and its draft.

        The draft's layers get the counts of the model's last layer.

        Args:
            all_experts: experts of a layer on all ranks, to choose among all of them; 0 to choose among this rank's.
        """
        counts = self.critical_counts(len(experts.layers) - experts.draft_layers, all_experts or experts.num_experts)
        return np.concatenate([counts, np.repeat(counts[-1:], experts.draft_layers, axis=0)])

    def begin(self, curves: Sequence[Sequence[float]]) -> None:
        """Set thresholds to a calibration's start values, if there are any.

        Thresholds that have moved already stay.
        """

    def count_ahead(self, layer: int, num_layers: int, named: int) -> tuple[int, int]:
        """Return how many predicted experts are fetched high, and how many at all.

        A predictor names ``named`` experts for the coming ``layer``, the best first; both counts are of the first ones.
        """
        return named if Precision.HIGH in self.precisions else 0, named

    def precisions_ahead(self, layer: int, num_layers: int, named: Sequence[int]) -> Mapping[int, Precision]:
        """Return the precision in which to fetch each predicted expert of a later layer.

        ``named`` lists the experts, the most probable first. Experts that the result omits are not fetched.
        """
        high, fetched = self.count_ahead(layer, num_layers, len(named))
        return {e: Precision.HIGH if place < high else Precision.LOW for place, e in enumerate(named[:fetched])}

    def counts_ahead(self, num_layers: int, experts: int) -> NDArray[np.int32]:
        """Return ``count_ahead`` as a table for a device.

        The table is int32 [2, num_layers, experts + 1]: high or all, layer, number of predicted experts.
        """
        counts = [[self.count_ahead(layer, num_layers, n) for n in range(experts + 1)] for layer in range(num_layers)]
        return np.array(counts, np.int32).transpose(2, 0, 1)


Evicts = Literal["coldest", "least recent", "first in"]
"""Values of the parameter ``evicts``: which expert of a layer is evicted first."""
EVICTIONS: Mapping[Evicts, Eviction] = {
    "coldest": Eviction.COLDEST, "least recent": Eviction.LEAST_RECENT, "first in": Eviction.FIRST_IN
}  # fmt: skip
_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Migrating(BaseModel):
    """How the set of high experts follows traffic.

    Parameters of policies that move versions between steps.
    """

    model_config = _FROZEN

    hotness: Literal["squared_gates", "uses"] = "squared_gates"
    """What makes an expert hot: its squared routing weights, times the measured quality loss of its low version if
    known; or its uses (the paper).
    """
    high_set: Literal["model", "layer"] = "model"
    """Whether experts compete for high versions across the whole model, each layer weighted by its effect on the
    output, or within their own layer (the paper).
    """
    alpha: float = Field(default=0.85, gt=0, le=1)
    """Weight of the latest window in the average of hotness."""
    window_s: NonNegativeFloat = 2
    """Seconds of a window, after which the high experts are chosen anew."""
    window_uses: PositiveFloat = 16
    """Minimum number of uses per expert, on average, before a window can end."""
    margin: NonNegativeFloat = 0.1
    """How much hotter an expert must be to replace a high one, in multiples of an even share of its layer's traffic."""
    in_flight: int = Field(default=2, ge=1, le=_MOST_AT_ONCE)
    """Experts moved at the same time. Nested versions may exceed it, within link_share."""
    link_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the time that the link may spend on moves."""

    @property
    def by_gates(self) -> bool:
        """Whether hotness is the sum of squared gates; otherwise it is the number of uses."""
        return self.hotness == "squared_gates"

    def at_once(self, seconds: float, each: float) -> int:
        """Return how many moves may be in flight.

        Moves that need no slot of their own fill the link's time: they begin between steps, and with only two per step
        a large model would take hundreds of steps to follow its traffic.

        Args:
            seconds: link time that moves may use.
            each: seconds of one move; 0 if a move needs a slot, or if none has finished yet.
        """
        return max(self.in_flight, min(_MOST_IN_FLIGHT, int(seconds / each))) if each else self.in_flight


@dataclass(frozen=True)
class ResidencyPolicy:
    """Which experts layers keep: plain data for every planner."""

    keeps: bool = True  # layers keep experts for later steps
    overlaps: bool = True  # experts arrive while others are computed
    evicts: Eviction = Eviction.COLDEST
    whole: bool = False  # of simulated schedules: compute an expert only when all its projections have arrived
    migrating: Migrating | None = None
    """How versions move between steps, so that every expert stays resident; None if steps fetch misses."""
    rescues: bool = False  # although versions move between steps, steps also fetch some high versions


@dataclass(frozen=True)
class PrefetchPolicy:
    """What predicts experts before their router runs, and how predictions are fetched."""

    name: str  # short name for logs and tables
    make: Callable[[RoutedModel], Predictor]
    """Returns the predictor for a model; raises PredictorError if the given trained predictor cannot be used."""
    layers: int = 1  # how many layers ahead are predicted
    needs_gates: bool = False  # the predictor evaluates the model's gates
    takes_predictor: bool = False  # a trained predictor can replace it
    first_layer: bool = False  # predict a prompt's first MoE layer before it is reached
    paced: bool = False  # act on predictions only as often as they pay
    needs_predictor: bool = False  # a trained predictor is required
    projections: int = len(EVERY_PROJECTION)
    """How many projections of an expert are fetched ahead, in the order gate, up, down."""
    wide: Callable[[int], int] = lambda top_k: 0
    """Returns the number of experts to prefetch concurrently, given the experts per token; 0 for the usual number."""


class Policy(BaseModel):
    """A way of serving experts.

    The base class serves every expert high, keeps experts and predicts nothing.
    """

    model_config = _FROZEN

    name: ClassVar[str]
    """Value of the option ``policy``."""
    summary: ClassVar[str]
    """What the policy does, and its source, in one line for users."""
    default_budget: ClassVar[ExpertBudget | None] = None
    """Default of ``expert_budget``; None for an automatic budget."""
    default_host_store: ClassVar[Literal["file", "pinned"] | None] = None
    """Default of ``host_store``; None to choose by the available memory."""
    default_low: ClassVar[int] = 0
    """Default of ``low``, in bits."""
    precision_parameters: ClassVar[tuple[str, ...]] = ()
    """Parameters of precision that can be changed while the model is served."""

    def of_stage(self, before: int, behind: int) -> "Policy":
        """Return the policy for one stage of a pipeline.

        The stage has ``before`` MoE layers before it and ``behind`` after it.
        """
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

    def staging_slots(self, slots: int) -> int:
        """Return how many of a precision's slots are for streaming and prefetch."""
        if not self.residency.keeps:
            return slots
        usual = max(FEWEST_STAGING, min(_USUAL_STAGING, slots // 8))
        return min(max(usual, slots // 64), _MOST_STAGING, slots)


class PolicyOptionError(ValueError):
    """An invalid option for a policy; the message says what is wrong and what to do.

    Attributes:
        option: name of the option.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason)
        self.option = option
