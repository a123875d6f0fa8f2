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
from vllm_dymoe.prefetch.gate import Gate
from vllm_dymoe.prefetch.on_device import DevicePredictor, GatesOnDevice
from vllm_dymoe.prefetch.side_stream import Answer, Inline, bytes_of_copies, some_rows


class NextGate(Predictor):
    """Predicts by the gates of the next layers.

    Args:
        gates: of every MoE layer, in order.
        top_k: experts per token of the model, t of Eqs. 7 and 8; in a prefill, every expert that a token chooses.
        layers: how many layers after this one are predicted in decode; in a prefill the next one suffices.
        hidden: model width, for the memory of inputs that a side stream reads.
    """

    def __init__(
        self, gates: Sequence[Gate], top_k: int, layers: int = 1, side_stream: Inline | None = None, hidden: int = 0
    ) -> None:
        super().__init__(side_stream)
        self._gates, self._hidden = gates, hidden
        self._top_k = top_k
        self._layers = layers
        self._x: torch.Tensor | None = None
        self._phase = Phase.DECODE

    @property
    def nbytes(self) -> int:
        return bytes_of_copies(1, self._hidden) if self._side_stream.answers_later else 0

    def observe(self, routing: Routing) -> None:
        self._x, self._phase, self._read = some_rows(routing.x), routing.phase, None

    def begin(self, layer: int) -> None:
        assert self._x is not None
        coming = self._coming(layer)

        def best(x: torch.Tensor) -> Answer:
            return tuple(part for later in coming for part in self._gates[later].best(x, self._top_k))

        self._read = self._side_stream.begin(best, self._x)

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Return experts of the next layers, the nearest layer first."""
        if self._x is None or not (coming := self._coming(layer)):
            return []
        answer = self._answer(layer)
        self._x = None
        found = zip(coming, answer[::2], answer[1::2], strict=True)
        return [one for later, experts, scores in found for one in self._gates[later].named(later, experts, scores)]

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        return GatesOnDevice(table, self._top_k, self._gates, self._layers)

    def _coming(self, layer: int) -> range:
        depth = self._layers if self._phase is Phase.DECODE else 1
        return range(layer + 1, min(layer + 1 + depth, len(self._gates)))
