"""Layer prefetch: every expert of the next layer, as MoESys does (a baseline of DuoServe-MoE, section 6.1)."""

from collections.abc import Sequence

from vllm_dymoe.predict.base import Candidate
from vllm_dymoe.residency.routing import Routing


class AllExperts:
    """Names all experts of the next layer, whatever the router decided.

    Args:
        num_layers: MoE layers on this rank.
        num_experts: experts of a layer on this rank.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._answers = [
            [Candidate(layer, expert, 1.0) for expert in range(num_experts)] if layer < num_layers else []
            for layer in range(1, num_layers + 1)
        ]

    @property
    def nbytes(self) -> int:
        """None: it has no weights."""
        return 0

    def observe(self, routing: Routing) -> None:
        """Nothing to learn."""

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Every expert of the next layer; nothing after the last."""
        return self._answers[layer]
