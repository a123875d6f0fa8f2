"""The interface of predictors, and statistics of their accuracy.

Predictors predict experts of later layers.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.table import Table

if TYPE_CHECKING:  # circular otherwise: on_device imports gates, which import this module
    from vllm_dymoe.prefetch.on_device import DevicePredictor


class Candidate(NamedTuple):
    """An expert that a later layer will probably want."""

    layer: int  # position of its layer among the model's MoE layers, after the observed one
    expert: int  # the rank's number of the expert


class Predictor(ABC):
    """Predicts experts; knows nothing of slots, bytes and transfers."""

    tells_phases: ClassVar[bool] = False
    """Whether a step with prompts and decoding requests must say which rows are which."""

    @property
    def nbytes(self) -> int:
        """Device memory in bytes; 0 without weights of its own."""
        return 0

    @property
    def settled(self) -> bool:
        """Whether it has stopped tuning itself, if it does."""
        return True

    def begin_step(self, phase: Phase) -> None:  # noqa: B027
        """Begin a step of requests, none of whose layers has been observed."""

    def observe(self, routing: Routing) -> None:  # noqa: B027
        """See a layer's routing.

        Called for every MoE layer of every step, in order, so it must be cheap.
        """

    def slots_changed(self) -> None:  # noqa: B027
        """Handle a change of slots: from now on layers have another cache."""

    def on_device(self, table: Table, experts: ModelExperts) -> "DevicePredictor | None":
        """Return the predictor of small-batch steps that the device plans, or None.

        Args:
            table: the device's.
            experts: of the rank.
        """
        return None

    @abstractmethod
    def predict(self, layer: int) -> Sequence[Candidate]:
        """Return experts that later layers will want, the most useful first.

        ``layer`` is the last observed layer.
        """


@dataclass
class PredictionStats:
    """Accuracy of a predictor (FIRM-MoE).

    Counts are summed over all layers and steps with a prediction, even an empty one. correct / needed is prediction
    accuracy (Eq. 7), correct / predicted is expert utilisation (Eq. 8). Predicted experts count whether or not they
    were then prefetched.
    """

    predicted: int = 0  # experts predicted for later layers
    needed: int = 0  # experts that routers chose in layers with a prediction
    correct: int = 0  # experts in both

    def add(self, asked: int, predicted: int, needed: int, correct: int, *others: int) -> None:
        """Add what a device has counted, in the order of PredictionCount."""
        self.predicted += predicted
        self.needed += needed
        self.correct += correct


class Measured:
    """A predictor with statistics.

    ``seconds`` is the host time that its predictions took.
    """

    def __init__(self, predictor: Predictor, before: "Measured | None" = None) -> None:
        """Continue the counts of the predictor ``before`` it, if there was one."""
        self.predictor = predictor
        self.stats: PredictionStats = PredictionStats() if before is None else before.stats
        self.seconds: float = 0.0 if before is None else before.seconds
        self._predicted: dict[int, set[int]] = {}

    def reset_stats(self) -> None:
        self.stats, self.seconds = PredictionStats(), 0.0

    @property
    def nbytes(self) -> int:
        return self.predictor.nbytes

    def begin_step(self, phase: Phase) -> None:
        self.predictor.begin_step(phase)

    def observe(self, routing: Routing) -> None:
        predicted = self._predicted.pop(routing.layer, None)
        if routing.layer == 0:  # discard what a failed step left
            self._predicted.clear()
        if predicted is not None:
            self.stats.predicted += len(predicted)
            needed = routing.counts.keys()
            self.stats.needed += len(needed)
            self.stats.correct += len(predicted & needed)
        with self._timed():
            self.predictor.observe(routing)

    def predict(self, layer: int) -> Sequence[Candidate]:
        with self._timed():
            candidates = self.predictor.predict(layer)
        if not candidates:
            self._predicted.setdefault(layer + 1, set())
        for candidate in candidates:
            self._predicted.setdefault(candidate.layer, set()).add(candidate.expert)
        return candidates

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


def rank(experts: Tensor, scores: Tensor, named: Tensor | None = None) -> list[int]:
    """Return the experts that a layer's tokens would choose, best first.

    For several tokens they are ordered by how many would choose them (DyMoE Eq. 7), then by their summed scores.

    Args:
        experts: int64 [tokens, choices], best first for each token.
        scores: float32, same shape.
        named: bool, same shape: which choices count; None for all.
    """
    alone = len(experts) == 1
    ids, weights = (experts.flatten(), scores.flatten()) if named is None else (experts[named], scores[named])
    if alone:
        return ids.tolist()
    counts = torch.bincount(ids)
    mass = torch.zeros(len(counts), dtype=torch.float32, device=ids.device).index_add_(0, ids, weights)
    order = mass.argsort(descending=True)
    order = order[counts[order].argsort(descending=True, stable=True)]
    return order[counts[order] > 0].tolist()
