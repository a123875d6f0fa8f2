"""Meeting of Layers: only the experts that several earlier layers agree on (FIRM-MoE, section Meeting-of-Layers).

With x_m the router's input of layer m and W_g^(l) the gate of layer l:

    S_l^(m) = TopKIndices(x_m W_g^(l), K)        for each of the P layers m before l      (Eq. 5)
    S_l     = intersection of S_l^(m) over m = l-P ... l-1                                (Eq. 6)

The first layers have fewer than P before them, and meet with those. An intersection names less than one layer would
and is right more often: it saves transfers where the link is scarce. The paper's batch is one token; of several, the
experts that most tokens' intersections hold come first.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from vllm_dymoe.predict.base import Candidate, Phase
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.ranking import rank_by_frequency
from vllm_dymoe.predict.tuner import Heop


class MeetingOfLayers:
    """Asks the next layer's gate about the inputs of the last P layers.

    Args:
        gates: of every MoE layer, in order.
        k: K of Eq. 5.
        p: P of Eqs. 5 and 6.
        tuner: chooses K and P while serving; they stay as they are if None.
        hits: how many experts layers have found on the device so far, for the tuner.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        k: int,
        p: int,
        tuner: Heop | None = None,
        hits: Callable[[], int] = lambda: 0,
    ) -> None:
        self._gates = gates
        self._setting = (k, p)
        self._tuner = tuner
        self._hits = hits
        self._hits_before = 0
        self._inputs: deque[torch.Tensor] = deque(maxlen=tuner.largest_p if tuner else p)
        self._layer = -1
        self._phase = Phase.DECODE
        self._named: frozenset[int] | None = None

    def observe(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, phase: Phase) -> None:
        """Keep this layer's input for the layers that come, and tell the tuner how its own prediction was."""
        if layer <= self._layer:
            self._inputs.clear()
            self._named = None
        self._layer, self._phase = layer, phase
        # A copy: the memory of x may belong to something else when the next layer runs.
        self._inputs.append(x.clone() if self._inputs.maxlen != 1 else x)
        if self._tuner is not None:
            self._report(layer, ids)

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The experts of the next layer that every layer of the meeting names."""
        following = layer + 1
        if following >= len(self._gates):
            return []
        k, p = self._tuner.setting(following) if self._tuner else self._setting
        gate = self._gates[following]
        meeting = list(self._inputs)[-p:]
        tokens = len(meeting[-1])
        scores = gate.scores(torch.cat(meeting))
        best = scores.topk(min(k, scores.shape[1]), dim=-1)
        if tokens == 1:
            sets = best.indices.tolist()
            agreed = set(sets[-1]).intersection(*sets[:-1])
            values = best.values[-1].tolist()
            ranked = [(expert, score) for expert, score in zip(sets[-1], values, strict=True) if expert in agreed]
        else:
            ids = best.indices[-tokens:]
            named = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best.indices, True)
            kept = named.view(len(meeting), tokens, -1).all(0).gather(1, ids)
            ranked = rank_by_frequency(ids[kept], best.values[-tokens:][kept])
        candidates = [Candidate(following, here, score) for expert, score in ranked if (here := gate.here(expert)) >= 0]
        self._named = frozenset(candidate.expert for candidate in candidates)
        return candidates

    def _report(self, layer: int, ids: torch.Tensor) -> None:
        """Tell the tuner about this layer of a decode step, and when the step ends."""
        assert self._tuner is not None
        hits = self._hits()
        found, self._hits_before = max(0, hits - self._hits_before), hits
        named, self._named = self._named, None
        if self._phase is not Phase.DECODE:
            return
        if named is not None:
            active = {expert for expert in ids.flatten().tolist() if expert >= 0}
            self._tuner.record(layer, unused=len(named - active), missed=len(active - named), hits=found)
        if layer == len(self._gates) - 1:
            self._tuner.end_step()
