"""The default: every expert high, the hottest kept, and the next layer's gate asked ahead."""

from typing import ClassVar

from pydantic import NonNegativeInt

from vllm_dymoe.predict import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.systems.base import System
from vllm_dymoe.systems.pace import Pace, PaidPace


class Exact(System):
    """Nothing changes but where experts are."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "every expert at `hi`, the hottest kept"

    look_ahead: NonNegativeInt = 1
    """How many layers ahead gates are asked, or a predictor is: 0 fetches nothing before its router names it."""

    @property
    def decides_on_device(self) -> bool:
        """Everything is high."""
        return True

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
