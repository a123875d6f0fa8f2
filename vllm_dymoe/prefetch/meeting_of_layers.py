"""Meeting of Layers: only the experts that several earlier layers agree on.

The source is FIRM-MoE, section Meeting-of-Layers. With x_m the router's input of layer m and W_g^(l) the gate of layer
l:

    S_l^(m) = TopKIndices(x_m W_g^(l), K)        for each of the P layers m before l      (Eq. 5)
    S_l     = intersection of S_l^(m) over m = l-P ... l-1                                (Eq. 6)

The first layers have fewer than P layers before them, and use those. An intersection predicts less than one layer would
and is correct more often: it saves transfers if the link is scarce. The paper's batch is one token; with several, the
experts in most tokens' intersections come first.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.base import Candidate, Predictor
from vllm_dymoe.prefetch.gate import Gate, some_rows
from vllm_dymoe.prefetch.on_device import DevicePredictor, VotingOnDevice
from vllm_dymoe.prefetch.tuner import Heop


class MeetingOfLayers(Predictor):
    """Evaluates the next layer's gate on the inputs of the last P layers.

    ``held`` returns a layer's resident experts, which cost no transfer.
    """

    def __init__(
        self,
        gates: Sequence[Gate],  # of every MoE layer, in order
        k: int,  # K of Eq. 5
        p: int,  # P of Eqs. 5 and 6
        tuner: Heop | None = None,  # chooses K and P while serving; if None they do not change
        held: Callable[[int], Set[int]] = lambda layer: frozenset(),
    ) -> None:
        self._gates = gates
        self._setting = (k, p)
        self._tuner = tuner
        self._held = held
        self._there: Set[int] = frozenset()
        self._inputs: deque[torch.Tensor] = deque(maxlen=tuner.largest.p if tuner else p)
        self._layer = -1
        self._phase = Phase.DECODE
        self._named: frozenset[int] | None = None

    def observe(self, routing: Routing) -> None:
        layer, x = routing.layer, some_rows(routing.x)
        if layer <= self._layer:
            self._inputs.clear()
            self._named = None
        self._layer, self._phase = layer, routing.phase
        # A copy, because the memory of x may be reused when the next layer runs.
        self._inputs.append(x.clone() if self._inputs.maxlen != 1 else x)
        if self._tuner is not None:
            self._report(layer, routing.counts)

    @property
    def settled(self) -> bool:
        return self._tuner is None or self._tuner.settled

    def slots_changed(self) -> None:
        if self._tuner is not None:
            self._tuner.restart()

    def predict(self, layer: int) -> Sequence[Candidate]:
        following = layer + 1
        if following >= len(self._gates):
            return []
        k, p = self._tuner.setting(following) if self._tuner else self._setting
        gate = self._gates[following]
        candidates = gate.named(following, *_meet(gate, k, *list(self._inputs)[-p:]))
        self._named = frozenset(candidate.expert for candidate in candidates)
        self._there = self._held(following) if self._tuner else frozenset()
        return candidates

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        fmt, voters = next(iter(experts.formats.values())), self._inputs.maxlen or 1
        inputs = torch.zeros(voters, SMALL_BATCH_ROWS, fmt.hidden, dtype=fmt.dtype, device=table.predicted.device)
        return VotingOnDevice(table, experts.top_k, self._gates, self._setting, self._tuner, inputs)

    def _report(self, layer: int, chosen: Mapping[int, int]) -> None:
        assert self._tuner is not None
        named, self._named = self._named, None
        if self._phase is not Phase.DECODE:
            return
        if named is not None:
            unused, missed = named - chosen.keys() - self._there, chosen.keys() - named
            hits = len(chosen.keys() & self._there)
            self._tuner.record(layer, unused=len(unused), missed=len(missed), hits=hits)
        if layer == len(self._gates) - 1:
            self._tuner.end_step()


def _meet(gate: Gate, k: int, *meeting: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the last layer's predictions, their scores, and whether all layers agree.

    Each is [tokens, k] (Eqs. 5 and 6).
    """
    layers, tokens = len(meeting), len(meeting[-1])
    scores = gate.scores(torch.cat(meeting))
    best = scores.topk(min(k, scores.shape[1]), dim=-1)
    named = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best.indices, True)
    experts = best.indices[-tokens:]
    return experts, best.values[-tokens:], named.view(layers, tokens, -1).all(0).gather(1, experts)
