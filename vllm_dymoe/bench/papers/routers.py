"""What papers show of routers, from one trace: similarity, popularity, agreement of layers, experts of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch

from vllm_dymoe.bench.papers.tables import Number, Numbers, Recorded
from vllm_dymoe.observe.statistics import activation_similarity, affinity, by_domain, load, overlap, popularity
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.predict.gate import Gate

_TOKENS = 2000  # as FIRM-MoE counts (section "Impact of Fine-Grained Pre-fetching")


def similarity(recorded: Recorded) -> Numbers:
    """Cosine between the router inputs of neighbouring layers (DyMoE Figure 6)."""
    found = activation_similarity(recorded.trace)
    if found is None:
        return {}
    return {"lowest": float(found.min()), "mean": float(found.mean()), "highest": float(found.max())}


def heavy_hitters(recorded: Recorded) -> Numbers:
    """Whether tokens that matter go to other experts than tokens do (DyMoE Figure 4), means over the layers."""
    trace: Trace = recorded.trace
    if trace.heavy is None:
        raise ValueError("the trace was recorded without heavy hitters; record it with the system dymoe")
    everything, heavy = load(trace.select(trace.prefill)), load(trace, trace.heavy)
    quarter = trace.header.num_experts // 4
    busiest = [counts.topk(quarter).values.sum(-1) / counts.sum(-1) for counts in (everything, heavy)]
    together = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(everything, heavy, strict=True)]
    return {
        "of all tokens, to the busiest quarter %": 100 * float(busiest[0].mean()),
        "of heavy hitters %": 100 * float(busiest[1].mean()),
        "correlation of the loads": sum(together) / len(together),
    }


def hot_sets(recorded: Recorded) -> Numbers:
    """How much the ten hottest experts of a layer carry, and two domains share of them (DynaExq Figure 2)."""
    trace: Trace = recorded.trace
    top = min(10, trace.header.num_experts)
    parts = list(by_domain(trace).values())
    shared = [overlap(one, other)[:, top - 1] for one, other in combinations(parts, 2)]
    carried = popularity(trace).topk(top).values.sum(-1)
    found: dict[str, Number] = {"traffic of a layer's ten hottest %": 100 * float(carried.mean())}
    if shared:
        pairs = torch.stack(shared)
        found |= {"shared by two domains, mean %": 100 * float(pairs.mean()), "least %": 100 * float(pairs.min())}
    return found


def patterns(recorded: Recorded) -> Numbers:
    """How uneven experts are used, and follow each other, in multiples of chance (DuoServe-MoE Figure 2)."""
    experts = recorded.trace.header.num_experts
    return {
        "most popular expert": float(popularity(recorded.trace).max(-1).values.mean()) * experts,
        "strongest affinity": float(affinity(recorded.trace).max(-1).values.mean()) * experts,
    }


def activated(recorded: Recorded, batch: int, *, prefill: bool) -> float | None:
    """Percent of a layer's experts that a step of so many requests uses, or None (DynaExq Tables 1 and 2)."""
    trace: Trace = recorded.trace
    part = trace.select(trace.prefill == prefill)
    steps = list(part.steps(batch))
    if prefill:
        requests = list(part.by_request())
        steps = [torch.cat(requests[i : i + batch]) for i in range(0, len(requests) - batch + 1, batch)]
    shares = [
        len(part.experts[step, layer].unique()) / trace.header.num_experts
        for step in steps[:256]
        for layer in range(trace.header.num_layers)
    ]
    return 100 * sum(shares) / len(shares) if shares else None


def _inputs(recorded: Recorded) -> Trace:
    """Decoded tokens with the routers' inputs; ValueError if they, or the gates, are not known."""
    trace: Trace = recorded.trace
    if trace.router_inputs is None or not recorded.gates:
        raise ValueError("the model's gates could not be read from its checkpoint")
    decoded = trace.select(~trace.prefill)
    return decoded.select(torch.arange(min(_TOKENS, decoded.num_tokens)))


@dataclass(frozen=True)
class Votes:
    """How layers vote (FIRM-MoE Figure 7); a union is the weight 1 and the threshold 1."""

    weights: tuple[float, ...]  # of layers, that of the nearest one first
    threshold: float  # votes that an expert needs

    def named(self, gate: Gate, k: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Experts that have enough of the layers' votes: bool [tokens, experts]."""
        scores = torch.stack([gate.scores(x) for x in inputs])
        ballots = torch.zeros_like(scores).scatter_(-1, scores.topk(min(k, scores.shape[-1])).indices, 1.0)
        weights = self.weights[: len(inputs)]
        given = (ballots * scores.new_tensor(weights[::-1])[:, None, None]).sum(0)
        # Fewer layers than the threshold is for need all of their votes, as a meeting of fewer does.
        return given >= min(self.threshold, sum(weights)) - 1e-6


def strategy(recorded: Recorded, k: int, p: int, votes: Votes) -> Numbers:
    """Expert utilisation and prediction accuracy of a way to name experts (FIRM-MoE Figure 7, Eqs. 7 and 8)."""
    trace, right, named, wanted = _inputs(recorded), 0, 0, 0
    assert trace.router_inputs is not None
    for layer in range(1, trace.header.num_layers):
        gate = Gate(partial(torch.nn.functional.linear, weight=recorded.gates[layer].float()))
        said = votes.named(gate, k, [trace.router_inputs[:, m].float() for m in range(max(0, layer - p), layer)])
        asked = torch.zeros_like(said).scatter_(1, trace.experts[:, layer].long(), True)
        right += int((said & asked).sum())
        named += int(said.sum())
        wanted += int(asked.sum())
    return {"utilisation %": 100 * right / max(1, named), "accuracy %": 100 * right / wanted}
