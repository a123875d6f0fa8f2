"""Look-ahead: the next layer's gate applied to this layer's router input (DyMoE, section 4.4.1).

With h_i the router's input of token i in layer l, and W_g the gate of the next one:

    g_i = Softmax(h_i W_g^(l+1))                      (Eq. 6)
    s_i = TopK_k(g_i),  c_e = sum_i 1(e in s_i)       (Eq. 7)  prefill: the t experts of the largest c_e
    P = TopK_t(g_i)                                   (Eq. 8)  decode: the t experts of the largest g_i

The residual stream changes little from layer to layer, which is why this finds most of them. The paper asks the next
layer's gate alone; the gates of layers further on can be asked too, whose answers are worth less and come after it.
"""

from collections.abc import Sequence

import torch

from vllm_dymoe.predict.base import Candidate, Phase
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.ranking import rank_by_frequency


class NextGate:
    """Asks the gate of the next layer.

    Args:
        gates: of every MoE layer, in order.
        top_k: experts per token of the model.
        decode_experts: t of Eq. 8, for each token of the step; ``top_k`` if None.
        prefill_experts: t of Eq. 7, for the whole step; every expert that a token chooses if None.
        layers: how many layers after this one are foreseen in decode; a prefill has enough to do with the next.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        top_k: int,
        decode_experts: int | None = None,
        prefill_experts: int | None = None,
        layers: int = 1,
    ) -> None:
        self._gates = gates
        self._top_k = top_k
        self._decode_experts = decode_experts or top_k
        self._prefill_experts = prefill_experts
        self._layers = layers
        self._x: torch.Tensor | None = None
        self._phase = Phase.DECODE

    def observe(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, phase: Phase) -> None:
        """Note this layer's input; the gate is asked only when somebody wants to know."""
        self._x, self._phase = x, phase

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Experts of the next layers, the nearest first."""
        x, self._x = self._x, None
        if x is None:
            return []
        depth = self._layers if self._phase is Phase.DECODE else 1
        coming = range(layer + 1, min(layer + 1 + depth, len(self._gates)))
        return [candidate for later in coming for candidate in self._ask(later, x)]

    def _ask(self, later: int, x: torch.Tensor) -> list[Candidate]:
        gate = self._gates[later]
        scores = gate.scores(x)
        decode = self._phase is Phase.DECODE
        best = scores.topk(min(self._decode_experts if decode else self._top_k, scores.shape[1]), dim=-1)
        if len(x) == 1:
            ranked = list(zip(best.indices[0].tolist(), best.values[0].tolist(), strict=True))
        else:
            ranked = rank_by_frequency(best.indices.flatten(), best.values.flatten(), scores.shape[1])
        if not decode:
            ranked = ranked[: self._prefill_experts]
        return [Candidate(later, here, score) for expert, score in ranked if (here := gate.here(expert)) >= 0]
