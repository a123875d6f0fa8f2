"""An oracle: what every layer of a repeated run will want, from a record of its first time.

No server can have it. It is the bound that the other predictors are measured against.
"""

from collections.abc import Sequence

from vllm_dymoe.predict.base import Candidate
from vllm_dymoe.residency.routing import Routing


class Oracle:
    """Records a run and says nothing; after ``rewind`` names exactly what the same run wants next.

    Args:
        ahead: how many layers after the observed one it names.
    """

    def __init__(self, ahead: int = 1) -> None:
        self._ahead = ahead
        self._steps: list[dict[int, list[int]]] = []
        self._recording = True
        self._step = -1
        self._layer = 0

    def rewind(self) -> None:
        """From now on the recorded steps are expected again, from the first."""
        self._recording, self._step, self._layer = False, -1, 0

    @property
    def nbytes(self) -> int:
        """None: it has no weights."""
        return 0

    def observe(self, routing: Routing) -> None:
        """Record the experts that a layer wants, or follow the record."""
        layer, chosen = routing.layer, routing.counts
        if self._step < 0 or layer <= self._layer:
            self._step += 1
            if self._recording:
                self._steps.append({})
        self._layer = layer
        if self._recording:
            self._steps[-1][layer] = sorted(chosen, key=chosen.__getitem__, reverse=True)

    def predict(self, layer: int) -> Sequence[Candidate]:
        """What the record says of the layers after this one, the most wanted of the nearest first."""
        if self._recording or self._step >= len(self._steps):
            return []
        step = self._steps[self._step]
        coming = [later for later in range(layer + 1, layer + 1 + self._ahead) if later in step]
        return [
            Candidate(later, expert, 1 / (1 + later - layer + rank / (1 + len(step[later]))))
            for later in coming
            for rank, expert in enumerate(step[later])
        ]
