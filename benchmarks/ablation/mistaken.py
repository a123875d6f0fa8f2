"""An oracle that is wrong a set share of the time: mispredictions of a known number."""

import random
from collections.abc import Sequence

from vllm_dymoe.predict import Candidate
from vllm_dymoe.predict.oracle import Oracle


class Mistaken(Oracle):
    """Names an expert that nobody wants in the place of a share of the right ones.

    Args:
        ahead: as an oracle's.
        wrong: the share, 0 to 1.
        num_experts: of a layer.
    """

    def __init__(self, ahead: int, wrong: float, num_experts: int) -> None:
        super().__init__(ahead)
        self._wrong = wrong
        self._num_experts = num_experts
        self._random = random.Random(0)

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The oracle's names, some of them replaced."""
        right = super().predict(layer)
        wanted = {(candidate.layer, candidate.expert) for candidate in right}
        return [self._replaced(candidate, wanted) for candidate in right]

    def _replaced(self, candidate: Candidate, wanted: set[tuple[int, int]]) -> Candidate:
        others = [e for e in range(self._num_experts) if (candidate.layer, e) not in wanted]
        if not others or self._random.random() >= self._wrong:
            return candidate
        return candidate._replace(expert=self._random.choice(others))
