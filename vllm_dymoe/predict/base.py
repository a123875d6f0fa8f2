"""The question a predictor answers: which experts will the coming layers want?"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vllm_dymoe.predict.side_stream import SideStream
from vllm_dymoe.residency.routing import Routing


class Candidate(NamedTuple):
    """An expert that a coming layer will probably want.

    Attributes:
        layer: position of its layer among the model's MoE layers, later than the one that was observed.
        expert: its number on this rank.
        score: larger is likelier; comparable within one answer, and for one layer, only.
    """

    layer: int
    expert: int
    score: float


class Predictor(Protocol):
    """Names experts and touches nothing: it knows of no slot, no byte and no transfer."""

    @property
    def nbytes(self) -> int:
        """Device memory that it takes; 0 without weights of its own."""
        ...

    def observe(self, routing: Routing) -> None:
        """Hear what a layer's router decided. Called for every MoE layer of every step, in order; must be cheap."""
        ...

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Experts that layers after ``layer`` will want, the most useful first; empty if there is nothing to say.

        Args:
            layer: the one that was observed last.
        """
        ...


class SideStreamPredictor(ABC):
    """A predictor that can compute while the layer's experts do; see :mod:`~vllm_dymoe.predict.side_stream`.

    Between ``observe`` and ``predict`` it may be told to begin. It derives from this class, by which it is known.
    """

    def __init__(self, side_stream: SideStream) -> None:
        self._side_stream = side_stream

    @property
    def answers_later(self) -> bool:
        """Whether it is best told to begin at once, and asked when the layer's first experts have been enqueued."""
        return self._side_stream.answers_later

    @property
    def nbytes(self) -> int:
        """As of any predictor."""
        return 0

    @abstractmethod
    def begin(self, layer: int) -> None:
        """Compute what ``predict`` will be asked for, on the side stream."""

    @abstractmethod
    def observe(self, routing: Routing) -> None:
        """As of any predictor."""

    @abstractmethod
    def predict(self, layer: int) -> Sequence[Candidate]:
        """As of any predictor."""
