"""The default: every expert high, the hottest kept, and the next layer's gate asked ahead (DyMoE 4.4.1)."""

from functools import cached_property
from typing import ClassVar

from pydantic import NonNegativeInt

from vllm_dymoe.predict import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.side_stream import make_side_stream
from vllm_dymoe.systems.base import Foresight, Residency, System


class Exact(System):
    """Nothing changes but where experts are."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "every expert at `hi`, the hottest kept"

    look_ahead: NonNegativeInt = 1
    """Layers ahead that gates, or a predictor, are asked about; more where experts come from a disk, 0 for none."""

    @cached_property
    def residency(self) -> Residency:
        return Residency(on_device=True)

    @cached_property
    def foresight(self) -> Foresight | None:
        """The next layers' gates on this layer's input, or the trained predictor that was given."""
        if not self.look_ahead:
            return None
        return Foresight("next gate", self._predictor, needs_gates=True, takes_predictor=True, paced=True)

    def _predictor(self, model: RoutedModel) -> Predictor:
        if model.predictor is not None:
            return TrainedPredictor.load(model)
        layers = max(self.look_ahead, model.horizon)
        return NextGate(model.gates, model.top_k, layers=layers, side_stream=make_side_stream(model.device))
