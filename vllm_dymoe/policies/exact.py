"""The default: every expert high, the hottest kept, and the next layer's gate asked ahead (DyMoE 4.4.1)."""

from functools import cached_property
from typing import ClassVar

from pydantic import Field

from vllm_dymoe.policies.base import Policy, PrefetchPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.next_gate import NextGate
from vllm_dymoe.prefetch.side_stream import make_side_stream

_MOST_LAYERS = 1 << 16  # more than any model has


class Exact(Policy):
    """Nothing changes but where experts are."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "every expert at `high`, the hottest kept"

    look_ahead: int = Field(default=1, ge=0, le=_MOST_LAYERS)
    """Layers ahead that gates, or a predictor, are asked about; more where experts come from a disk, 0 for none."""

    @cached_property
    def prefetch(self) -> PrefetchPolicy | None:
        """The next layers' gates on this layer's input, or the trained predictor that was given."""
        if not self.look_ahead:
            return None
        return PrefetchPolicy("next gate", self._predictor, needs_gates=True, takes_predictor=True, paced=True)

    def _predictor(self, model: RoutedModel) -> Predictor:
        if model.predictor is not None:
            return TrainedPredictor.load(model)
        layers = max(self.look_ahead, model.horizon)
        return NextGate(model.gates, model.top_k, layers, make_side_stream(model.device), model.hidden)
