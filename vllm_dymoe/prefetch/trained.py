"""The trained predictor (DuoServe-MoE 5.3).

In decode a network predicts the next layers' experts from routing so far. A prefill uses nearly all experts, so the
most popular ones are predicted (5.2). In a step with both phases the network is evaluated on the decoding rows, and its
predictions come first.
"""

from collections.abc import Sequence

import torch

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.base import Candidate, Predictor, rank
from vllm_dymoe.prefetch.checkpoint import PredictorError, load_predictor
from vllm_dymoe.prefetch.folded import FoldedMLP
from vllm_dymoe.prefetch.gate import RoutedModel
from vllm_dymoe.prefetch.on_device import DevicePredictor, NetworkOnDevice


class TrainedPredictor(Predictor):
    """Evaluates a network on its device.

    In decode it predicts a fixed number of experts per token, nearest layers first.
    """

    tells_phases = True

    def __init__(self, network: FoldedMLP, decode_experts: int) -> None:
        self.network = network
        self._amount = min(decode_experts, network.num_experts)
        self._past: torch.Tensor | None = None
        self._x: torch.Tensor | None = None
        self._layer = -1
        self._decodes = self._mixed = False
        self._rows: torch.Tensor | None = None  # decoding rows, in a step with both phases
        self._favourites = [_ranked(layer, shares) for layer, shares in enumerate(network.popularity.float().cpu())]

    @classmethod
    def load(cls, model: RoutedModel, look_ahead: int = 1) -> "TrainedPredictor":
        """Load the file that a model names, for up to ``look_ahead`` layers ahead.

        PredictorError if none is named, or if it is missing, damaged, another model's or worse than the next gate.
        """
        if model.predictor is None:
            raise PredictorError("a trained predictor needs its file; name it in the option predictor.")
        card, network = load_predictor(model.predictor)
        card.check(model.predictor, model.identity)
        network = network.nearest(look_ahead).to(model.device, network_dtype(model.device))
        return cls(network, model.top_k)

    @property
    def nbytes(self) -> int:
        return self.network.nbytes

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        return NetworkOnDevice(table, self._amount, self.network)

    def observe(self, routing: Routing) -> None:
        layer = routing.layer
        before = None if layer <= self._layer else self._past  # a step begins where layer numbers do not grow
        self._layer, self._x = layer, routing.x
        self._mixed = routing.phase is Phase.PREFILL and routing.prompt is not None and routing.prompt.mixed
        self._decodes = self._mixed or routing.phase is Phase.DECODE
        ids = routing.ids
        if self._mixed:
            assert routing.prompt is not None
            if before is None or self._rows is None:
                self._rows = (~routing.prompt.rows).nonzero().flatten()
            ids, self._x = ids[self._rows], routing.x[self._rows]
        if self._coming(layer):
            self._past = self.network.remember(ids, before)

    def predict(self, layer: int) -> Sequence[Candidate]:
        following = layer + 1
        if following >= self.network.num_layers:
            return []
        if following == 0 or not self._decodes:
            return self._favourites[following]
        assert self._past is not None
        x, self._x = None if self.network.gates is None else self._x, None
        named: list[Candidate] = []
        for later in self._coming(layer):
            logits = self.network.logits(later, self._past, x, ahead=later - layer)
            scores, experts = logits.topk(self._amount)
            named += [Candidate(later, expert) for expert in rank(experts, scores.float().sigmoid())]
        if self._mixed:
            known = {candidate.expert for candidate in named if candidate.layer == following}
            named += [candidate for candidate in self._favourites[following] if candidate.expert not in known]
        return named

    def _coming(self, layer: int) -> range:
        """Return the layers for which the network is evaluated."""
        return range(
            layer + 1, min(layer + 1 + self.network.look_ahead, self.network.num_layers) if self._decodes else 0
        )


def network_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which a network runs.

    A CPU has no fast products of 16-bit numbers, so it takes float32.
    """
    return torch.float32 if device.type == "cpu" else torch.float16


def _ranked(layer: int, shares: torch.Tensor) -> list[Candidate]:
    """Return every expert of a layer that was ever chosen, the most popular first."""
    order = shares.argsort(descending=True).tolist()
    return [Candidate(layer, expert) for expert in order if shares[expert] > 0]
