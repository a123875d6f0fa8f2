"""Look-ahead: the next layer's gate applied to this layer's router input.

The source is DyMoE, section 4.4.1. With h_i the router's input of token i in layer l, and W_g the gate of the next one:

    g_i = Softmax(h_i W_g^(l+1))                      (Eq. 6)
    s_i = TopK_k(g_i),  c_e = sum_i 1(e in s_i)       (Eq. 7)  prefill: the t experts of the largest c_e
    P = TopK_t(g_i)                                   (Eq. 8)  decode: the t experts of the largest g_i

The residual stream changes little from layer to layer, so this predicts most experts. The paper uses only the next
layer's gate; gates of later layers can be used as well, with less accuracy, and their predictions come later.
"""

from collections.abc import Sequence

import torch

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.base import Candidate, Predictor
from vllm_dymoe.prefetch.gate import Gate, some_rows
from vllm_dymoe.prefetch.on_device import DevicePredictor, GatesOnDevice


class NextGate(Predictor):
    """Predicts by the gates of the next layers.

    Args:
        gates: of every MoE layer, in order.
        top_k: experts per token of the model, t of Eqs. 7 and 8; in a prefill, every expert that a token chooses.
        layers: how many layers after this one are predicted in decode; in a prefill the next one suffices.
    """

    def __init__(self, gates: Sequence[Gate], top_k: int, layers: int = 1) -> None:
        self._gates = gates
        self._top_k = top_k
        self._layers = layers
        self._x: torch.Tensor | None = None
        self._phase = Phase.DECODE

    def observe(self, routing: Routing) -> None:
        self._x, self._phase = some_rows(routing.x), routing.phase

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Return experts of the next layers, the nearest layer first."""
        x, self._x = self._x, None
        if x is None:
            return []
        gates = ((later, self._gates[later]) for later in self._coming(layer))
        return [one for later, gate in gates for one in gate.named(later, *gate.best(x, self._top_k))]

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        return GatesOnDevice(table, self._top_k, self._gates, self._layers)

    def _coming(self, layer: int) -> range:
        depth = self._layers if self._phase is Phase.DECODE else 1
        return range(layer + 1, min(layer + 1 + depth, len(self._gates)))
