"""The question a predictor answers: which experts will the coming layers want?"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch


class Phase(Enum):
    """What a step is for: prefill if any of its requests computes more than one token of its own, else decode.

    Drafted tokens are not a request's own. The last token of a prompt alone is a decode step, which it looks like.
    """

    PREFILL = "prefill"
    DECODE = "decode"


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

    def observe(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        chosen: Mapping[int, int],
    ) -> None:
        """Hear what a layer's router decided. Called for every MoE layer of every step, in order; must be cheap.

        Args:
            layer: position among the model's MoE layers; a step begins where it does not grow.
            x: [tokens, hidden] bfloat16 or float16, the router's input. Another layer may overwrite it: copy what is to
                be kept.
            ids: [tokens, top_k] int, local experts; negative where another rank has the expert.
            weights: [tokens, top_k] float32 routing weights.
            phase: of the whole step.
            chosen: this rank's experts in ``ids``, each with how often it is there. The host knows them already; who
                reads ``ids`` itself waits for the device once more.
        """
        ...

    # One that computes beside the layer has ``answers_later``, which is true, and ``begin(layer)``, which is called
    # after observe if predict will be called, once the layer's experts compute.

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Experts that layers after ``layer`` will want, the most useful first; empty if there is nothing to say.

        Args:
            layer: the one that was observed last.
        """
        ...
