"""Prefetch schemes by name: the parameters that a user may set, and the predictor that they make."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from vllm_dymoe.predict.all_experts import AllExperts
from vllm_dymoe.predict.base import Predictor
from vllm_dymoe.predict.beside import beside
from vllm_dymoe.predict.checkpoint import PredictorError, load_predictor
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.predict.trained import TrainedPredictor
from vllm_dymoe.predict.tuner import Heop, Setting
from vllm_dymoe.traces import TraceHeader

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RoutedModel:
    """What a predictor may know of the model.

    Attributes:
        num_layers: MoE layers on this rank.
        num_experts: experts of a layer on this rank.
        top_k: experts per token.
        gates: of every layer, in order; empty where they are not known.
        hits: how many experts layers have found on the device so far.
        hidden: model width.
        fingerprint: of the weights, which a trained predictor must have been trained for.
        device: where predictions are computed.
        predictor: file of a trained predictor; None if none was given.
    """

    num_layers: int
    num_experts: int
    top_k: int
    gates: Sequence[Gate] = ()
    hits: Callable[[], int] = lambda: 0
    hidden: int = 0
    fingerprint: str = ""
    device: torch.device = _CPU
    predictor: Path | None = None


class Scheme(BaseModel):
    """The parameters of one scheme."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    needs_gates: ClassVar[bool] = False

    def build(self, model: RoutedModel) -> Predictor | None:
        """The predictor for a model; None if nothing is to be foreseen."""
        raise NotImplementedError


class NoPrefetch(Scheme):
    """Nothing is fetched before a router has named it."""

    def build(self, model: RoutedModel) -> None:
        """No predictor."""
        return


class LayerScheme(Scheme):
    """All experts of the next layer (MoESys)."""

    def build(self, model: RoutedModel) -> AllExperts:
        """See :mod:`~vllm_dymoe.predict.all_experts`."""
        return AllExperts(model.num_layers, model.num_experts)


class PopularityScheme(Scheme):
    """The next layer's most popular experts (DuoServe-MoE Eq. 2)."""

    decode_experts: PositiveInt | None = None
    """How many to name in decode; the model's experts per token if not set."""
    half_life: PositiveFloat = 1000
    """Steps after which a step counts half."""

    def build(self, model: RoutedModel) -> Popularity:
        """See :mod:`~vllm_dymoe.predict.popularity`."""
        return Popularity(model.num_layers, model.num_experts, self.decode_experts or model.top_k, self.half_life)


class NextGateScheme(Scheme):
    """The next layer's gate on this layer's input (DyMoE Eqs. 6-8)."""

    needs_gates = True
    decode_experts: PositiveInt | None = None
    """t of Eq. 8, for each token of a decode step; the model's experts per token if not set."""
    prefill_experts: PositiveInt | None = None
    """t of Eq. 7, for a whole prefill step; every expert that a token would choose if not set."""
    layers: PositiveInt = 1
    """How many layers ahead decode looks; the paper's is 1."""

    def build(self, model: RoutedModel) -> NextGate:
        """See :mod:`~vllm_dymoe.predict.next_gate`."""
        where = beside(model.device)
        return NextGate(model.gates, model.top_k, self.decode_experts, self.prefill_experts, self.layers, where)


class MeetingScheme(Scheme):
    """What the last P layers agree on (FIRM-MoE Eqs. 5 and 6), with HEOP (Algorithm 1)."""

    needs_gates = True
    k: PositiveInt | None = None
    """K of Eq. 5, where the tuning begins; the model's experts per token if not set."""
    p: PositiveInt = 3
    """P of Eqs. 5 and 6, where the tuning begins."""
    tune: bool = True
    """Whether HEOP changes K and P while serving."""
    largest_p: PositiveInt = 6
    """The largest P that HEOP tries; K is tried up to twice the model's experts per token."""
    alpha: PositiveFloat = 0.5
    """Cost of an expert that is named and not wanted (Eq. 11)."""
    beta: PositiveFloat = 0.5
    """Cost of an expert that is wanted and not named (Eq. 11)."""
    update_every: PositiveInt = 10
    """Decode steps between two moves."""
    patience: PositiveInt = 2
    """Moves without a new best before the search turns."""
    rounds: PositiveInt = 20
    """Moves before the best is kept."""
    shift: PositiveFloat = 25
    """How much the cost may drift, in deviations added up over steps, before the search begins again."""
    seed: int = 0
    """Seed of the first direction."""

    def build(self, model: RoutedModel) -> MeetingOfLayers:
        """See :mod:`~vllm_dymoe.predict.meeting_of_layers`."""
        start = Setting(min(self.k or model.top_k, model.num_experts), self.p)
        largest = Setting(max(start.k, min(2 * model.top_k, model.num_experts)), max(start.p, self.largest_p))
        tuner = Heop(
            model.num_layers,
            start,
            largest,
            self.alpha,
            self.beta,
            self.update_every,
            self.patience,
            self.rounds,
            self.shift,
            self.seed,
        )
        tuned, where = tuner if self.tune else None, beside(model.device)
        return MeetingOfLayers(model.gates, start.k, start.p, tuned, model.hits, where)


class TrainedScheme(Scheme):
    """What a network that was trained on a trace of this model foresees (DuoServe-MoE, sections 4.2 and 5.3)."""

    decode_experts: PositiveInt | None = None
    """How many to name for each token of a decode step; the model's experts per token if not set."""

    def build(self, model: RoutedModel) -> TrainedPredictor:
        """See :mod:`~vllm_dymoe.predict.trained`.

        Raises:
            PredictorError: the file is missing, damaged or another model's.
        """
        if model.predictor is None:
            raise PredictorError('prefetch "trained" needs the file of a predictor; name it in the option predictor.')
        card, network = load_predictor(model.predictor)
        sizes = model.num_layers, model.num_experts, model.top_k, model.hidden
        card.check(model.predictor, TraceHeader("", model.fingerprint, *sizes))
        # A CPU has no fast products of 16-bit numbers.
        dtype = torch.float32 if model.device.type == "cpu" else torch.float16
        amount = self.decode_experts or model.top_k
        return TrainedPredictor(network.to(model.device, dtype), amount, beside(model.device))


SCHEMES: Mapping[str, type[Scheme]] = {
    "none": NoPrefetch,
    "layer": LayerScheme,
    "popularity": PopularityScheme,
    "next-gate": NextGateScheme,
    "meeting-of-layers": MeetingScheme,
    "trained": TrainedScheme,
}


def make_scheme(name: str, parameters: Mapping[str, Any]) -> Scheme:
    """The scheme called ``name`` with these parameters.

    Raises:
        ValueError: no scheme has that name, or it has no such parameter, or not with that value.
    """
    if name not in SCHEMES:
        raise ValueError(f'prefetch "{name}" does not exist; choose one of {", ".join(SCHEMES)}')
    scheme = SCHEMES[name]
    try:
        return scheme(**parameters)
    except ValidationError as error:
        known = ", ".join(scheme.model_fields) or "none"
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg'][0].lower()}{item['msg'][1:]}" for item in error.errors()
        )
        raise ValueError(
            f'prefetch "{name}" does not take these prefetch_options ({problems}); it has {known}'
        ) from error
