"""The default: every expert high, the hottest kept, and the next layer's gate asked ahead."""

from typing import ClassVar

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from vllm_dymoe.predict import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.residency.format import EVERY_PROJECTION
from vllm_dymoe.systems.base import System
from vllm_dymoe.systems.pace import Pace, PaidPace


class Exact(System):
    """Nothing changes but where experts are."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "every expert at `hi`, the hottest kept"

    look_ahead: NonNegativeInt = 1
    """How many layers ahead gates are asked, or a predictor is: 0 fetches nothing before its router names it."""
    ahead_in_graph: int = Field(default=0, ge=0, le=24)
    """Projections of the next layer's experts that a decode step fetches ahead where the device decides; 0 for none."""

    @field_validator("ahead_in_graph")
    @classmethod
    def _check_ahead(cls, projections: int, info: ValidationInfo) -> int:
        if projections and not info.data.get("look_ahead"):
            raise ValueError("something has to name experts ahead, so that look_ahead must be 1 or more")
        return projections

    @property
    def projections_in_graph(self) -> int:
        """As the parameter says."""
        return self.ahead_in_graph

    @property
    def decides_on_device(self) -> bool:
        """Everything is high."""
        return True

    def named_ahead(self, top_k: int) -> int:
        """In a graph, two layers' guesses: one is read while the other is fetched."""
        return 2 * -(-self.ahead_in_graph // len(EVERY_PROJECTION))

    @property
    def foresight(self) -> str | None:
        """The next layer's gate on this layer's input (DyMoE 4.4.1)."""
        return "next gate" if self.look_ahead else None

    @property
    def needs_gates(self) -> bool:
        """As long as anything is to be fetched ahead."""
        return self.look_ahead > 0

    @property
    def takes_predictor(self) -> bool:
        """As long as anything is to be fetched ahead."""
        return self.look_ahead > 0

    def make_predictor(self, model: RoutedModel) -> Predictor | None:
        """The trained one that was given, or the gates."""
        if not self.look_ahead:
            return None
        if model.predictor is not None:
            return TrainedPredictor.load(model)
        return NextGate(model.gates, model.top_k, layers=self.look_ahead, side_stream=make_side_stream(model.device))

    def make_pace(self) -> Pace:
        """Guesses have to pay for what they cost."""
        return PaidPace()
