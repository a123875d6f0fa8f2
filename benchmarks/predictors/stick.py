"""One measuring stick for every predictor: a trace is replayed token by token, as decode would run it.

Every predictor is asked through the interface that the runtime uses, after each layer of each token, and names as many
experts as a token uses (those that decide themselves how many may name fewer). Bytes are counted in front of a cache
that keeps a share of each layer's experts, least recently used first out: what is there already costs nothing.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dymoe.predict import Candidate, Predictor
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.traces import Trace


@dataclass(frozen=True)
class Replay:
    """What became of one predictor's answers, for each token and each layer but the first.

    Attributes:
        right: int [tokens, layers - 1], experts that were named and chosen.
        named: likewise, experts that were named.
        useful: likewise, named experts that were fetched and chosen.
        wasted: likewise, named experts that were fetched and not chosen.
        missed: likewise, chosen experts that were neither kept nor named.
        microseconds: of asking, for each layer; the median over tokens.
        top_k: experts that a token chooses.
    """

    right: torch.Tensor
    named: torch.Tensor
    useful: torch.Tensor
    wasted: torch.Tensor
    missed: torch.Tensor
    microseconds: float
    top_k: int

    def rates(self, tokens: torch.Tensor | None = None, layer: int | None = None) -> dict[str, float]:
        """Of some tokens, and of one layer or all.

        Returns:
            ``all_k`` and ``at_least_one`` (DuoServe-MoE, Table 3), ``accuracy`` and ``utilisation`` (FIRM-MoE Eqs. 7
            and 8), and per token and layer the experts that were ``useful``, ``wasted`` and ``missed``.
        """

        def part(counts: torch.Tensor) -> torch.Tensor:
            counts = counts if tokens is None else counts[tokens]
            return (counts if layer is None else counts[:, layer - 1]).float()

        right, named = part(self.right), part(self.named)
        return {
            "all_k": (right == self.top_k).float().mean().item(),
            "at_least_one": (right > 0).float().mean().item(),
            "accuracy": right.mean().item() / self.top_k,
            "utilisation": right.sum().item() / max(1.0, named.sum().item()),
            "useful": part(self.useful).mean().item(),
            "wasted": part(self.wasted).mean().item(),
            "missed": part(self.missed).mean().item(),
        }


class _Cache:
    """Least recently used of one layer."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, expert: int) -> bool:
        return expert in self._kept

    def use(self, experts: Sequence[int]) -> None:
        for expert in experts:
            self._kept[expert] = None
            self._kept.move_to_end(expert)
        while len(self._kept) > self._slots:
            self._kept.popitem(last=False)


def replay(predictor: Predictor, trace: Trace, tokens: torch.Tensor, kept: float = 0.25) -> Replay:
    """Ask a predictor about every layer of some tokens of a trace, in their order.

    Args:
        predictor: which one.
        trace: with router inputs, if the predictor looks at them.
        tokens: indices.
        kept: share of a layer's experts that the cache holds.
    """
    header = trace.header
    layers, top_k = header.num_layers, header.top_k
    caches = [_Cache(max(1, int(kept * header.num_experts))) for _ in range(layers)]
    counts = torch.zeros(5, len(tokens), layers - 1, dtype=torch.int32)
    seconds = []
    nothing = torch.zeros(1, 1, dtype=torch.bfloat16)
    experts = trace.experts[tokens].int()
    weights = trace.weights[tokens].float()
    inputs = None if trace.router_inputs is None else trace.router_inputs[tokens].bfloat16()
    for row, chosen_in in enumerate(experts.tolist()):
        answer: Sequence[Candidate] = []
        for layer, chosen in enumerate(chosen_in):
            if layer:
                wanted, named = set(chosen), {candidate.expert for candidate in answer}
                fetched = {expert for expert in named if expert not in caches[layer]}
                missed = {expert for expert in wanted - named if expert not in caches[layer]}
                figures = len(named & wanted), len(named), len(fetched & wanted), len(fetched - wanted), len(missed)
                counts[:, row, layer - 1] = torch.tensor(figures)
            caches[layer].use(chosen)
            x = nothing if inputs is None else inputs[row, layer][None]
            begin = time.perf_counter()
            ids, row_weights = experts[row, layer][None], weights[row, layer][None]
            predictor.observe(Routing(layer, layers, x, ids, row_weights))
            answer = [candidate for candidate in predictor.predict(layer) if candidate.layer == layer + 1]
            if layer + 1 < layers:
                seconds.append(time.perf_counter() - begin)
    return Replay(*counts, microseconds=1e6 * sorted(seconds)[len(seconds) // 2], top_k=top_k)
