"""A policy for comparisons, with parts of the papers' policies to choose from."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.policies.base import EVICTIONS, PrefetchPolicy, ResidencyPolicy
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.prefetch import Candidate, Predictor, RoutedModel
from vllm_dymoe.prefetch.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.prefetch.side_stream import make_side_stream


class Oracle(Predictor):
    """Predicts exactly what the next layer's router will choose.

    It knows this from earlier requests that were the same, because greedy answers repeat.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, list[list[int]]] = {}  # by the first layer's routing: each layer's experts
        self._step: list[list[int]] = []
        self._again = False

    @property
    def settled(self) -> bool:
        """Return whether it has seen the running step before."""
        return self._again

    def observe(self, routing: Routing) -> None:
        if routing.layer == 0:
            key = routing.host_ids.tobytes() + routing.host_weights.tobytes()
            self._again = key in self._known
            self._step = self._known.setdefault(key, [])
        if not self._again:
            self._step.append(routing.active)

    def predict(self, layer: int) -> Sequence[Candidate]:
        coming = self._step[layer + 1 : layer + 2] if self._again else []
        return [Candidate(layer + 1, expert) for experts in coming for expert in experts]


class Votes(Predictor):
    """Predicts the experts that enough of the last layers name (FIRM-MoE, Figure 7)."""

    def __init__(self, model: RoutedModel, k: int, weights: Sequence[float], least: float) -> None:
        super().__init__()
        self._gates, self._k, self._weights, self._least = model.gates, k, weights, least
        self._inputs: deque[torch.Tensor] = deque(maxlen=len(weights))

    def observe(self, routing: Routing) -> None:
        if routing.layer == 0:
            self._inputs.clear()
        self._inputs.appendleft(routing.x.clone())

    def predict(self, layer: int) -> Sequence[Candidate]:
        if layer + 1 >= len(self._gates):
            return []
        gate = self._gates[layer + 1]
        scores = [gate.scores(x) for x in self._inputs]  # the nearest layer first
        votes = torch.zeros_like(scores[0])
        for weight, of_layer in zip(self._weights, scores, strict=False):
            votes.scatter_add_(1, of_layer.topk(self._k).indices, torch.full_like(of_layer[:, : self._k], weight))
        least = min(self._least, sum(self._weights[: len(scores)]))  # the first layers have fewer layers before them
        order = scores[0].sort(descending=True)
        return gate.named(layer + 1, order.indices, order.values, votes.gather(1, order.indices) >= least)


class Compared(Exact):
    """Serves every expert high, with parts of FIRM-MoE."""

    name: ClassVar[str] = "compared"
    summary: ClassVar[str] = "parts of policies, for measurements"

    # Predictor of the next layer's experts.
    ahead: Literal["nothing", "next gate", "meeting of layers", "votes", "oracle"] = "next gate"
    projections: int = Field(default=3, ge=1, le=3)  # FIRM-MoE's n
    k: int | None = Field(default=None, ge=1)  # experts that each layer predicts; the number per token if None
    p: int = Field(default=3, ge=1)  # layers that have to agree
    weights: tuple[float, ...] = (1.0, 1.0, 1.0)  # of the layers' votes, the nearest layer first
    least: float = 3.0  # votes that an expert needs, by weight
    whole: bool = False  # compute an expert only when all of it has arrived
    keeps: bool = True  # layers keep experts for later steps

    @cached_property
    def residency(self) -> ResidencyPolicy:
        return ResidencyPolicy(keeps=self.keeps, evicts=EVICTIONS[self.evicts], whole=self.whole)

    @cached_property
    def prefetch(self) -> PrefetchPolicy | None:
        if self.ahead == "nothing":
            return None
        kind: dict[str, Any] = {"needs_gates": True, "takes_predictor": True, "wide": lambda top_k: top_k}
        return PrefetchPolicy(self.ahead, self._compared, projections=self.projections, **kind)

    def _compared(self, model: RoutedModel) -> Predictor:
        if self.ahead == "next gate" or model.predictor is not None:
            return self._predictor(model)
        if self.ahead == "oracle":
            return Oracle()
        if self.ahead == "votes":
            return Votes(model, self.k or model.top_k, self.weights, self.least)
        return MeetingOfLayers(
            model.gates, self.k or model.top_k, self.p, held=model.held, side_stream=make_side_stream(model.device)
        )


def make_known() -> None:
    """Register the policy for the option ``policy``, in this process."""
    POLICIES[Compared.name] = Compared
