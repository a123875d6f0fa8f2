"""The question a predictor answers: which experts will the coming layers want?"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vllm_dymoe.experts.routing import Routing


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

    def observe(self, routing: Routing) -> None:
        """Hear what a layer's router decided. Called for every MoE layer of every step, in order; must be cheap."""
        ...

    # One that computes beside the layer has ``answers_later``, which is true, and ``begin(layer)``, which is called
    # after observe if predict will be called, once the layer's experts compute.

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Experts that layers after ``layer`` will want, the most useful first; empty if there is nothing to say.

        Args:
            layer: the one that was observed last.
        """
        ...
