"""ExpertMLP: a network that predicts the next layer's experts (DuoServe-MoE 4.2).

For layer l, with E_m the experts that a token chose in layer m, the state is

    h_l = {E_0, E_1, ..., E_(l-1)}                    the experts chosen so far                    (Eq. 4)
    s_l = [h_l, p_l, a_(l-1),l]                       with popularity and affinity of l            (Eq. 5)

and f(s_l) has one logit for each expert of layer l. The paper has one network of seven linear layers, 2048 to 64 wide;
each but the last is followed by batch normalisation, ReLU and dropout. It serves all layers, because the history is
padded to a fixed length; only p_l and the length of h_l distinguish layers. This is "paper-shared", 13 MB for
Mixtral-8x7B in float32. "paper" has such a network for each layer.

The history is one-hot here, whereas the paper pads indices with zeros: an expert's number is a name, not a quantity.
The affinity rows of the experts in E_(l-1) are averaged, so that they count equally in whatever order they were chosen.
Both make the first linear layer a sum over experts, which ``folded`` exploits.

Beyond the paper a network may see the router's input of layer l-1, and may have no hidden layer at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from vllm_dymoe.experts.identity import ModelIdentity

_CERTAINTY = 6.0  # logits between a certain expert and an excluded one, by affinity
PAPER_WIDTHS = (2048, 1024, 512, 256, 128, 64)


@dataclass(frozen=True)
class Architecture:
    """The kind and sizes of a network."""

    widths: tuple[int, ...] = PAPER_WIDTHS  # of the hidden layers; empty for a linear model
    history: int = 0  # number of previous layers that a layer sees; 0 for all of them
    shared: bool = False  # one network for all layers, instead of one for each
    router_input: bool = False  # whether it sees the router's input of the layer before
    dropout: float = 0.1  # dropout rate in training

    @property
    def by_least_squares(self) -> bool:
        """Whether it is trained by ``linear``, from the model's gates.

        Otherwise it is trained by gradient descent.
        """
        return not self.widths and self.router_input


ARCHITECTURES = {
    "linear+input": Architecture((), history=1, router_input=True),
    "paper": Architecture(),
    "paper+input": Architecture(router_input=True),
    "paper-shared": Architecture(shared=True),
    "linear": Architecture((), history=2),
}
"""Architectures by name, as ``vllm-dymoe train --architecture`` takes them, the default first."""


def chosen(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return experts as one-hot sums: [..., top_k] int -> float32 [..., num_experts]."""
    ones = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.float32, device=experts.device)
    return ones.scatter_(-1, experts.long(), 1.0)


class States(nn.Module):
    """Makes states s_l (Eq. 5) from what earlier layers chose.

    ``popularity`` is float32 [layers, experts] (Eq. 2), ``affinity`` float32 [layers - 1, experts, experts] (Eq. 3).
    """

    popularity: torch.Tensor
    affinity: torch.Tensor

    def __init__(
        self, sizes: ModelIdentity, architecture: Architecture, popularity: torch.Tensor, affinity: torch.Tensor
    ) -> None:
        super().__init__()
        self.sizes, self.architecture = sizes, architecture
        self.register_buffer("popularity", popularity)
        self.register_buffer("affinity", affinity)

    @property
    def history(self) -> int:
        everything = self.sizes.num_layers - 1
        return min(self.architecture.history or everything, everything)

    @property
    def parts(self) -> Sequence[int]:
        """Widths of h_l, p_l, a_l-1,l and the router's input, in this order."""
        experts = self.sizes.num_experts
        return self.history * experts, experts, experts, self.sizes.hidden if self.architecture.router_input else 0

    def forward(self, layer: int, experts: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return s_l of a layer l, from 1: float32 [tokens, sum of parts].

        The previous layer comes first in h_l. ``experts`` int [tokens, l or more, top_k] were chosen before layer l,
        ``router_input`` is [tokens, hidden] of layer l-1.
        """
        tokens, count = len(experts), self.sizes.num_experts
        seen = min(self.history, layer)
        recent = experts[:, layer - seen : layer].flip(1)
        past = torch.zeros(tokens, self.history, count, dtype=torch.float32, device=experts.device)
        past[:, :seen] = chosen(recent, count)
        rows = self.affinity[layer - 1][experts[:, layer - 1].long()].mean(1)
        parts = [past.flatten(1), self.popularity[layer].expand(tokens, count), rows]
        if self.architecture.router_input:
            assert router_input is not None
            parts.append(router_input.float())
        return torch.cat(parts, 1)


class ExpertMLP(nn.Module):
    """The network or networks of one model."""

    def __init__(self, states: States) -> None:
        super().__init__()
        self.states = states
        architecture, sizes = states.architecture, states.sizes
        networks = 1 if architecture.shared else sizes.num_layers - 1
        widths = (sum(states.parts), *architecture.widths, sizes.num_experts)
        self.networks = nn.ModuleList(_network(widths, architecture.dropout) for _ in range(networks))
        if not architecture.widths:
            self._begin_with_affinity()

    @torch.no_grad()
    def _begin_with_affinity(self) -> None:
        """Start a network without a hidden layer from affinity.

        With few training tokens nothing is lost, and more improve on it.
        """
        before = sum(self.states.parts[:2])
        for network in self.networks:
            assert isinstance(network, nn.Sequential)
            linear = network[0]
            assert isinstance(linear, nn.Linear)
            count = linear.out_features
            nn.init.zeros_(linear.weight)
            linear.weight[:, before : before + count] = _CERTAINTY * torch.eye(count)
            nn.init.constant_(linear.bias, -_CERTAINTY / 2)

    def network(self, layer: int) -> nn.Sequential:
        network = self.networks[0 if self.states.architecture.shared else layer - 1]
        assert isinstance(network, nn.Sequential)
        return network

    def forward(self, layer: int, experts: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of a layer's experts: float32 [tokens, num_experts].

        Arguments are as for :class:`States`.
        """
        return self.network(layer)(self.states(layer, experts, router_input))


def _network(widths: Sequence[int], dropout: float) -> nn.Sequential:
    modules: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        modules += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*modules, nn.Linear(widths[-2], widths[-1]))
