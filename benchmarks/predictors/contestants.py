"""Every predictor of the comparison, made for one trace: those that need no training, the networks, and an oracle."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from vllm_dymoe.predict import Candidate, Gate, Predictor
from vllm_dymoe.predict.meeting_of_layers import MeetingOfLayers
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.popularity import Popularity
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.traces import Trace, TraceHeader
from vllm_dymoe.traces.statistics import affinity


class Affinity(Predictor):
    """The experts that followed this layer's experts most often in a data set (DuoServe-MoE Eq. 3)."""

    def __init__(self, rows: torch.Tensor, top_k: int) -> None:
        self._rows, self._top_k = rows, top_k

    def observe(self, routing: Routing) -> None:
        """Note what was chosen."""
        self._ids = routing.ids

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The next layer's experts of the largest summed affinity."""
        if layer == len(self._rows):
            return []
        best = self._rows[layer].index_select(0, self._ids[0]).sum(0).topk(self._top_k)
        named = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Candidate(layer + 1, expert, score) for expert, score in named]


class Told(Predictor):
    """It is told what to say: what comes, as an oracle, or what was recorded of another predictor.

    Args:
        experts: [tokens, layers - 1, named], of each layer but the first.
    """

    def __init__(self, experts: torch.Tensor) -> None:
        self._experts, self._token = experts.tolist(), -1

    def observe(self, routing: Routing) -> None:
        """Go on in the record."""
        self._token += routing.layer == 0

    def predict(self, layer: int) -> Sequence[Candidate]:
        """The next layer's."""
        token = self._experts[self._token]
        return [Candidate(layer + 1, expert, 1.0) for expert in token[layer]] if layer < len(token) else []


def gates_of(folder: Path, header: TraceHeader) -> list[Gate]:
    """The routers of a checkpoint with names like Qwen3-MoE's."""

    def gate(weight: torch.Tensor) -> Gate:
        return Gate(lambda x: torch.nn.functional.linear(x, weight))

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return [gate(file.get_tensor(f"model.layers.{i}.mlp.gate.weight")) for i in range(header.num_layers)]


def untrained(trace: Trace, seen: torch.Tensor, gates: Sequence[Gate]) -> dict[str, Predictor]:
    """Those that no network is trained for.

    Args:
        trace: of the model.
        seen: indices of tokens that statistics may be taken from.
        gates: the model's routers; none where they are not known.
    """
    header = trace.header
    count, top_k = header.num_experts, header.top_k
    found: dict[str, Predictor] = {
        "popularity": Popularity(header.num_layers, count, top_k),
        "affinity": Affinity(affinity(trace.select(seen)).float(), top_k),
    }
    if gates:
        found["next-gate"] = NextGate(gates, top_k)
        found["meeting of layers"] = MeetingOfLayers(gates, top_k, p=2)
    return found
