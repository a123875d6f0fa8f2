"""A trained ExpertMLP for inference.

Batch normalisation is folded into the matrices, and the first matrix is a table. The first linear layer maps s_l =
[h_l, p_l, a_l-1,l] to

    W s_l + b = sum over m and e in E_m of W_h[m, e]  +  W_a (mean over e in E_l-1 of A[e])  +  (W_p p_l + b)

Everything except the experts is known beforehand. With k experts in each E_m it is a sum of rows of one table for each
l,

    T_l[m, e] = W_h[m, e] + (m = l-1) (W_a A_l-1,l[e] + W_p p_l + b) / k

so the first layer costs k rows for each layer of history, however wide the state is. A network that serves all layers
has one W_h: there the second term is a table of its own, of E rows for each l.

A linear network that sees the router's input may also have been trained for layers further ahead: for each number of
layers d it has a table and a matrix for what it saw d layers before.
"""

from collections.abc import Mapping

import torch
from torch import nn

from vllm_dymoe.prefetch.expert_mlp import ExpertMLP
from vllm_dymoe.trace.gates import find_correction


class FoldedMLP:
    """A network for every layer but the first, from tensors by name.

    Raises KeyError if a tensor is missing.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.tables = tensors["tables"]
        """[layers - 1 or 1, history * experts, width]; the last layer comes first."""
        self.recent = tensors.get("recent")
        """[layers - 1, experts, width], added for the last layer; None if it is part of ``tables``."""
        self.gates = tensors.get("gates")
        """[layers - 1 or 1, hidden, width], multiplies the router's input; None if that is not used."""
        later = range(sum(name.startswith("matrix.") for name in tensors))
        self.matrices = [tensors[f"matrix.{number}"] for number in later]
        """For each later linear layer, [layers - 1 or 1, width, next width]."""
        self.biases = [tensors[f"bias.{number}"] for number in later]
        """Biases of the later linear layers, [layers - 1 or 1, next width]."""
        self.popularity = tensors["popularity"]
        """[layers, experts], Eq. 2, for steps in which the network is not used."""
        self.scoring, self.correction = find_correction(tensors)
        """float32 [layers, experts], which routers add to their scores to choose experts; None if they add nothing."""
        self.further: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tables [layers - d, experts, experts] and gates [layers - d, hidden, experts] for d = 2, 3, ..."""
        while (name := f"tables.{2 + len(self.further)}") in tensors:
            self.further.append((tensors[name], tensors[f"gates.{2 + len(self.further)}"]))
        self.num_layers, self.num_experts = self.popularity.shape
        self.history = self.tables.shape[1] // self.num_experts
        self._tables = self.tables.unbind()  # views made once, not in every layer of every step

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def look_ahead(self) -> int:
        """How many layers after the observed one it can predict."""
        return 1 + len(self.further)

    def nearest(self, layers: int) -> "FoldedMLP":
        """Return the network for at most ``layers`` layers ahead."""
        far = {f"{kind}.{ahead}" for kind in ("tables", "gates") for ahead in range(layers + 1, self.look_ahead + 1)}
        return FoldedMLP({name: tensor for name, tensor in self.tensors.items() if name not in far})

    def to(self, device: torch.device, dtype: torch.dtype) -> "FoldedMLP":
        return FoldedMLP({name: tensor.to(device, dtype).contiguous() for name, tensor in self.tensors.items()})

    def remember(self, experts: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return the history with one more layer, the last first.

        The history is rows of a table, [tokens, top_k of each remembered layer]. ``experts`` int [tokens, top_k] are
        the layer's choices, ``before`` is the previous history, None for the first layer.
        """
        if self.history == 1:
            return experts
        if before is None:
            return experts.clone()  # it outlives the layer's own tensor
        if before.shape[1] == self.history * experts.shape[1]:
            before = before[:, : -experts.shape[1]]
        return torch.cat((experts, before + self.num_experts), 1)

    def logits(self, layer: int, rows: torch.Tensor, router_input: torch.Tensor | None, ahead: int = 1) -> torch.Tensor:
        """Return scores of a layer's experts: [tokens, num_experts].

        Scores have the network's dtype; ``layer`` is 1 or more. ``rows`` are earlier choices, as ``remember`` returns
        them; ``router_input`` is [tokens, hidden] of the layer ``ahead`` layers before.
        """
        if ahead == 1:
            x = self._next_logits(layer, rows, router_input)
        else:
            assert router_input is not None
            tables, gates = self.further[ahead - 2]
            x = torch.addmm(
                _sum_of_rows(tables[layer - ahead], rows), router_input.to(tables.dtype), gates[layer - ahead]
            )
        if self.correction is None:
            return x
        return (x.sigmoid() if self.scoring == "sigmoid" else x.softmax(-1)) + self.correction[layer]

    def _next_logits(self, layer: int, rows: torch.Tensor, router_input: torch.Tensor | None) -> torch.Tensor:
        x = _sum_of_rows(self._tables[layer - 1 if len(self._tables) > 1 else 0], rows)
        if self.recent is not None:
            x += _sum_of_rows(self.recent[layer - 1], rows[:, : rows.shape[1] // min(self.history, layer)])
        if self.gates is not None:
            assert router_input is not None
            x = torch.addmm(x, router_input.to(x.dtype), self.gates[layer - 1 if len(self.gates) > 1 else 0])
        for matrices, biases in zip(self.matrices, self.biases, strict=True):
            network = layer - 1 if len(matrices) > 1 else 0
            x = torch.addmm(biases[network], x.relu_(), matrices[network])
        return x


@torch.no_grad()
def fold(model: ExpertMLP) -> FoldedMLP:
    """Return a model for inference, in float32; the model is not changed."""
    states = model.states
    top_k = states.sizes.top_k
    tables, recents, gates, later = [], [], [], []
    for layer in range(1, states.sizes.num_layers):
        (first, bias), *others = _without_normalisation(model.network(layer))
        past, popular, related, x = first.split(list(states.parts), dim=1)
        constant = bias + popular @ states.popularity[layer]
        tables.append(past.T)
        recents.append((states.affinity[layer - 1] @ related.T + constant) / top_k)
        gates.append(x.T)
        later.append(others)
    networks = 1 if states.architecture.shared else len(tables)
    table, recent = torch.stack(tables[:networks]), torch.stack(recents)
    if networks == len(tables):
        table[:, : states.sizes.num_experts] += recent
    found = {"tables": table, "popularity": states.popularity}
    if states.architecture.router_input:
        found["gates"] = torch.stack(gates[:networks])
    if networks < len(tables):
        found["recent"] = recent
    for number in range(len(later[0])):
        found[f"matrix.{number}"] = torch.stack([layers[number][0].T for layers in later[:networks]])
        found[f"bias.{number}"] = torch.stack([layers[number][1] for layers in later[:networks]])
    return FoldedMLP(found)


def _sum_of_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of rows of a table: [tokens, width].

    The table is [entries, width], and ``rows`` are each token's rows, [tokens, n].
    """
    found = table.index_select(0, rows.flatten())
    return found.sum(0, keepdim=True) if len(rows) == 1 else found.view(*rows.shape, -1).sum(1)


def _without_normalisation(network: nn.Sequential) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return weights and biases of the linear layers.

    The normalisation that follows each is folded in.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in network:
        if isinstance(module, nn.Linear):
            found.append((module.weight.float(), module.bias.float()))
        elif isinstance(module, nn.BatchNorm1d):
            weight, bias = found[-1]
            assert module.running_mean is not None
            assert module.running_var is not None
            scale = module.weight / (module.running_var + module.eps).sqrt()
            found[-1] = weight * scale[:, None], (bias - module.running_mean) * scale + module.bias
    return found
