"""The default: every expert high, the hottest kept, and the next layer's gate asked ahead (DyMoE 4.4.1)."""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from vllm_dymoe.policies.base import EVICTIONS, Evicts, Policy, PrefetchPolicy, ResidencyPolicy
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

    evicts: Evicts = "coldest"
    """Which expert of a layer leaves first: the coldest; or, where the host plans, the one whose last use is longest
    ago (LRU), or that came first."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(evicts=EVICTIONS[self.evicts])

    @cached_property
    def prefetch(self) -> PrefetchPolicy | None:
        """The next layers' gates on this layer's input, or the trained predictor that was given."""
        if not self.look_ahead:
            return None
        asked: dict[str, Any] = {"layers": self.look_ahead, "needs_gates": True, "takes_predictor": True, "paced": True}
        return PrefetchPolicy("next gate", self._predictor, **asked)

    def _predictor(self, model: RoutedModel) -> Predictor:
        layers = max(self.look_ahead, model.horizon)
        if model.predictor is not None:
            return TrainedPredictor.load(model, layers)
        return NextGate(model.gates, model.top_k, layers, make_side_stream(model.device), model.hidden)
