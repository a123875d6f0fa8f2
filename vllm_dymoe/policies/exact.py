"""The default policy: every expert high, the hottest kept.

The next layer's gate predicts (DyMoE 4.4.1).
"""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from vllm_dymoe.policies.base import EVICTIONS, Evicts, Policy, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.prefetch import Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.next_gate import NextGate

_MOST_LAYERS = 1 << 16  # more than any model has


class Exact(Policy):
    """Serves every expert high, so that outputs do not depend on residency."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "every expert at `high`, the hottest kept"

    look_ahead: int = Field(default=1, ge=0, le=_MOST_LAYERS)
    """How many layers ahead gates, or a trained predictor, are evaluated; more if experts are on disk, 0 for no
    prediction.
    """

    evicts: Evicts = "coldest"
    """Which expert of a layer is evicted first: the coldest, the least recently used (LRU), or the first admitted."""

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(evicts=EVICTIONS[self.evicts])

    @cached_property
    def prefetch(self) -> PrefetchPolicy | None:
        """The next layers' gates, evaluated on this layer's input.

        A trained predictor replaces them if one is given.
        """
        if not self.look_ahead:
            return None
        asked: dict[str, Any] = {"layers": self.look_ahead, "needs_gates": True, "takes_predictor": True, "paced": True}
        return PrefetchPolicy("next gate", self._predictor, **asked)

    def _predictor(self, model: RoutedModel) -> Predictor:
        layers = max(self.look_ahead, model.horizon)
        if model.predictor is not None:
            return TrainedPredictor.load(model, layers)
        return NextGate(model.gates, model.top_k, layers)
