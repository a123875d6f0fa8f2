"""How right a predictor is, counted while serving (FIRM-MoE Eqs. 7 and 8).

With S_l the experts that were named for layer l and A_l those that its router then chose:

    prediction accuracy = |S_l and A_l| / |A_l|                                           (Eq. 7)
    expert utilisation  = |S_l and A_l| / |S_l|                                           (Eq. 8)

Both are ratios of sums over all layers and steps for which something was asked, also where the answer was empty. What
was named is counted, whether or not it was then prefetched.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dymoe.predict.base import Candidate, Predictor
from vllm_dymoe.residency.routing import Routing


@dataclass
class PredictionStats:
    """Sums over layers and steps."""

    named: int = 0  # experts that were named for a coming layer
    wanted: int = 0  # experts that routers chose in layers for which the predictor was asked
    right: int = 0  # experts that are in both


class Measured:
    """A predictor that is watched; ``seconds`` of host time its predictions took."""

    def __init__(self, predictor: Predictor, stats: PredictionStats | None = None) -> None:
        self.predictor = predictor
        self.stats = stats or PredictionStats()
        self.seconds = 0.0
        self._named: dict[int, set[int]] = {}

    @property
    def nbytes(self) -> int:
        return self.predictor.nbytes

    @property
    def answers_later(self) -> bool:
        return self.predictor.answers_later

    def observe(self, routing: Routing) -> None:
        named = self._named.pop(routing.layer, None)
        if routing.layer == 0:  # whatever a step that failed in the middle has left
            self._named.clear()
        if named is not None:
            self.stats.named += len(named)
            wanted = routing.counts.keys()
            self.stats.wanted += len(wanted)
            self.stats.right += len(named & wanted)
        begin = time.perf_counter()
        self.predictor.observe(routing)
        self.seconds += time.perf_counter() - begin

    def begin(self, layer: int) -> None:
        begin = time.perf_counter()
        self.predictor.begin(layer)
        self.seconds += time.perf_counter() - begin

    def predict(self, layer: int) -> Sequence[Candidate]:
        begin = time.perf_counter()
        candidates = self.predictor.predict(layer)
        self.seconds += time.perf_counter() - begin
        if not candidates:
            self._named.setdefault(layer + 1, set())
        for candidate in candidates:
            self._named.setdefault(candidate.layer, set()).add(candidate.expert)
        return candidates
