"""What a predictor may know of the model, above all its routers.

Routers can be evaluated on other layers' inputs.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch.base import Candidate, rank
from vllm_dymoe.trace.gates import GateWeights

FAR = 4
"""Useful number of layers ahead if experts are on disk: a read takes as long as several layers compute."""

_MOST_ROWS = 512  # most tokens of a step for which gates are evaluated
_CPU = torch.device("cpu")
_ASKED_AT_ONCE = 256  # unit vectors at a time, to limit memory


def some_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a view of at most 512 rows of x [tokens, hidden], evenly spaced."""
    return x[:: max(1, -(-len(x) // _MOST_ROWS))]


def weights_of(gates: Sequence["Gate"], hidden: int, device: torch.device) -> GateWeights:
    """Return all gates of a model as matrices, for training."""
    weights, biases = zip(*(gate.matrix(hidden, device) for gate in gates), strict=True)
    correction = None
    if any(gate.correction is not None for gate in gates):
        none = torch.zeros_like(biases[0])
        correction = torch.stack([none if gate.correction is None else gate.correction.float() for gate in gates])
    return GateWeights(torch.stack(weights), torch.stack(biases), correction, gates[0].scoring)


@dataclass(frozen=True)
class Gate:
    """Scores that make a router prefer one expert to another."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    """The gate itself, [tokens, hidden] -> [tokens, experts]; experts of all ranks."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # from logits to scores
    correction: torch.Tensor | None = None
    """float32 [experts], added to the scores for choosing only (DeepSeek-V3, GLM-4, Ernie-4.5)."""
    groups: int = 0
    """Number of groups of experts, of which only ``top_groups`` are chosen from; 0 for no groups (DeepSeek-V2, -V3)."""
    top_groups: int = 0  # number of groups that are chosen from
    local: Sequence[int] | None = None
    """This rank's number of each expert, negative for another rank's; None if the rank has all experts."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores by which the router chooses: float32 [tokens, experts].

        ``x`` is [tokens, hidden]. Experts in groups that are not chosen get -inf.
        """
        logits = self.logits(x).float()
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        if self.correction is not None:
            scores = scores + self.correction
        if self.groups > 1 and self.top_groups < self.groups:
            grouped = scores.unflatten(-1, (self.groups, -1))
            best = 2 if self.correction is not None else 1
            of_groups = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(-1)
            chosen = torch.zeros_like(of_groups, dtype=torch.bool)
            chosen.scatter_(-1, of_groups.topk(self.top_groups, dim=-1).indices, True)
            scores = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores

    def best(self, x: torch.Tensor, amount: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts that tokens would choose, best first, and their scores.

        Both are [tokens, up to ``amount``].
        """
        scores = self.scores(x)
        values, indices = scores.topk(min(amount, scores.shape[1]), dim=-1)
        return indices, values

    def named(
        self, layer: int, experts: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> list[Candidate]:
        """Return this rank's experts among those that tokens would choose.

        The candidates are for this gate's layer, in the order of :func:`rank`.
        """
        chosen_here = (expert if self.local is None else self.local[expert] for expert in rank(experts, scores, chosen))
        return [Candidate(layer, expert) for expert in chosen_here if expert >= 0]

    @torch.no_grad()
    def matrix(self, hidden: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gate as a matrix, by evaluating unit vectors.

        Weights are [experts, hidden] in its dtype, biases float32 [experts].
        """
        bias = self.logits(torch.zeros(1, hidden, dtype=torch.float32, device=device))[0]
        units = torch.eye(hidden, dtype=torch.float32, device=device)
        rows = [self.logits(part) - bias for part in units.split(_ASKED_AT_ONCE)]
        return torch.cat(rows).T.contiguous(), bias.float()

    def agreement(self, x: torch.Tensor, ids: torch.Tensor, tolerance: float = 0.0) -> float:
        """Return the share of a router's choices that this gate would make.

        ``x`` is [tokens, hidden]. Choices ``ids`` are int [tokens, top_k], negative for another rank's. A choice also
        counts if the gate would miss it by at most ``tolerance`` of the token's largest score.
        """
        scores, ids = self.scores(x), ids.long()
        if self.local is not None:
            experts = torch.full((len(self.local) + 1,), -1, dtype=torch.int64, device=ids.device)
            for expert, here in enumerate(self.local):
                experts[here] = expert if here >= 0 else -1
            ids = experts[ids]
        chosen = ids >= 0
        if not chosen.any():
            return 1.0
        # Scores instead of sets of experts: experts of equal scores are interchangeable.
        best = scores.topk(ids.shape[1], dim=-1).values
        good = scores.gather(-1, ids.clamp(min=0)) >= best[:, -1:] - tolerance * best[:, :1].abs()
        return good[chosen].float().mean().item()


@dataclass(frozen=True)
class RoutedModel:
    """The routers of one rank's model."""

    num_layers: int  # MoE layers on this rank
    num_experts: int  # experts of a layer on this rank
    top_k: int  # experts per token
    gates: Sequence[Gate] = ()  # of every layer, in order; empty if unknown
    held: Callable[[int], Set[int]] = lambda layer: frozenset()  # returns which experts of a layer are resident
    hidden: int = 0  # model width
    fingerprint: str = ""  # of the weights for which a trained predictor must have been trained
    device: torch.device = _CPU  # where predictions are computed
    horizon: int = 1  # useful number of layers ahead in decode
    predictor: Path | None = None  # file of a trained predictor; None if none was given

    @property
    def identity(self) -> ModelIdentity:
        """The model that a trained predictor has to match; its name does not matter."""
        return ModelIdentity("", self.fingerprint, self.num_layers, self.num_experts, self.top_k, self.hidden)
