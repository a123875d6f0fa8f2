"""Training of the linear predictor while a server serves.

    steps      | see, see, ... end | see, see, ... end | ...          rows of decode steps, copied on the device
    block      [ up to 64 tokens of all layers            ]
    every block: judge the candidate on it, then add it to the sums (``linear``)

A *round* trains as many layers as ``memory`` has room for sums of: collect tokens, solve a candidate (a layer per
step), judge it on the next tokens, which it was not trained on, and adopt its layers if it predicts more experts than
the next layer's gate and than the network before. Layers that were not trained yet are the next gate itself. With every
pass over all layers a round has twice as many tokens.

``see`` only copies to fixed addresses, so that a CUDA graph can contain it; everything else runs between steps, on the
device, and the host reads numbers once a round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.prefetch.folded import FoldedMLP
from vllm_dymoe.prefetch.gate import Gate, weights_of
from vllm_dymoe.prefetch.linear import LeastSquares, ask_next_gates, hits, hits_of, make_network
from vllm_dymoe.trace.gates import GateWeights

_ROWS = 64  # rows of a step that are used, and tokens of a block
_CANDIDATE, _INCUMBENT, _GATE = range(3)


@dataclass(frozen=True)
class Verdict:
    """The accuracy of a candidate on tokens that it was not trained on."""

    layers: range  # layers whose states were used
    trained_on: int  # number of tokens
    judged_on: int  # number of tokens
    accuracy: tuple[float, ...]  # share of chosen experts predicted by candidate, network before, and next gate
    whole: tuple[float, ...]  # share of layers all of whose experts were predicted, likewise
    adopted: bool


class OnlineTraining:
    """One rank's training; all of its memory is allocated at start.

    Args:
        sizes: the model.
        look_ahead: how many layers ahead are predicted.
        device: the one that serves.
        dtype: of router inputs.
        network_dtype: of the network.
        memory: bytes for sums; at least those of one layer.
        before: a network of an earlier run to start from; None to start from the next gates.
        gates: of the model, as far as they are known; whether they have a correction does not change later.
        first_tokens: tokens of the first round, before a candidate is solved.
        judged_tokens: tokens on which a candidate is judged.
    """

    def __init__(
        self,
        sizes: ModelIdentity,
        look_ahead: int,
        device: torch.device,
        dtype: torch.dtype,
        network_dtype: torch.dtype,
        memory: int,
        *,
        before: FoldedMLP | None = None,
        gates: Sequence[Gate] = (),
        first_tokens: int = 1024,
        judged_tokens: int = 512,
    ) -> None:
        self.sizes, self.judged_tokens, self.due = sizes, judged_tokens, first_tokens
        self.look_ahead = min(look_ahead, sizes.num_layers - 1)
        self.verdicts: list[Verdict] = []
        self.tokens = 0  # seen since the start
        self._device, self._before = device, before
        layers, top_k, hidden = sizes.num_layers, sizes.top_k, sizes.hidden
        self._steps_x = torch.zeros(layers, _ROWS, hidden, dtype=dtype, device=device)
        self._steps_experts = torch.zeros(layers, _ROWS, top_k, dtype=torch.int32, device=device)
        self._x, self._experts, self._filled = self._steps_x.clone(), self._steps_experts.clone(), 0
        self._counts = torch.zeros(layers, sizes.num_experts, dtype=torch.float32, device=device)
        self._judged = torch.zeros(3, 2, layers - 1, dtype=torch.int64, device=device)
        # Rates of network and gate, when they were adopted.
        self._rates = torch.full((2, 2, layers - 1), torch.nan, dtype=torch.float32)
        self._weights = torch.zeros(layers, sizes.num_experts, hidden, dtype=dtype, device=device)
        corrected = any(gate.correction is not None for gate in gates)
        scoring = gates[0].scoring if corrected else None
        self.network = make_network(sizes, self.look_ahead, device, network_dtype, scoring)
        self._candidate = make_network(sizes, self.look_ahead, device, network_dtype, scoring)
        self.network.tables.fill_(torch.nan)  # which names nothing
        self._take_before()
        at_once = max(1, memory // LeastSquares.layer_bytes(sizes, self.look_ahead))
        self._groups = [range(at, min(at + at_once, layers - 1)) for at in range(0, layers - 1, at_once)]
        self._group, self._trained_on, self._judged_on, self._judging = 0, 0, 0, False
        self._solving: Iterator[int] | None = None
        self._sums = self._new_sums()
        self._gates: GateWeights | None = None

    @staticmethod
    def nbytes(sizes: ModelIdentity, look_ahead: int, item: int, memory: int) -> int:
        """Return the device memory in addition to the network.

        The network's numbers have ``item`` bytes.
        """
        look_ahead = min(look_ahead, sizes.num_layers - 1)
        layers, features = sizes.num_layers, sizes.num_experts + sizes.hidden
        a_layer = LeastSquares.layer_bytes(sizes, look_ahead)
        sums = min(layers - 1, max(1, memory // a_layer)) * a_layer
        buffers = 2 * layers * _ROWS * (2 * sizes.hidden + 4 * sizes.top_k)
        solving = 3 * 8 * features * features
        gates = 2 * layers * sizes.num_experts * sizes.hidden
        return sums + buffers + solving + gates + network_bytes(sizes, look_ahead, item)

    @property
    def trained(self) -> bool:
        """Whether a candidate was adopted."""
        return any(verdict.adopted for verdict in self.verdicts)

    def see(self, layer: int, x: torch.Tensor, experts: torch.Tensor) -> None:
        """Keep a layer's router input and its choices until the step ends.

        ``x`` is [rows, hidden], ``experts`` int [rows, top_k].
        """
        rows = min(len(x), _ROWS)
        self._steps_x[layer, :rows].copy_(x[:rows])
        self._steps_experts[layer, :rows].copy_(experts[:rows])

    @torch.no_grad()
    def end_step(self, tokens: int, gates: Sequence[Gate]) -> bool:
        """End a step of decoded tokens; return whether the network was improved.

        ``tokens`` is their number. ``gates`` are the model's, which choose as its routers do.
        """
        rows = min(tokens, _ROWS)
        if self._gates is None:
            self._begin(gates)
        if self._solving is not None:
            self._solve_a_layer()
        better = self._end_block(gates) if self._filled + rows > _ROWS else False
        block = slice(self._filled, self._filled + rows)
        self._x[:, block], self._experts[:, block] = self._steps_x[:, :rows], self._steps_experts[:, :rows]
        self._filled += rows
        self.tokens += rows
        return better

    def card(self, model: ModelIdentity, version: str) -> PredictorCard:
        """Return the network's card.

        Its accuracies were measured when its layers were adopted.
        """
        trained, gate = ({"all_k": whole, "accuracy": right} for right, whole in self._rates.nanmean(-1).tolist())
        adopted = [verdict for verdict in self.verdicts if verdict.adopted]
        tokens = [adopted[-1].trained_on, adopted[-1].judged_on] if adopted else [0, 0]
        return PredictorCard(
            model,
            {"name": "linear+input"},
            {"path": "a server's own steps", "tokens": tokens},
            {"trained": trained, "next gate": gate},
            version=version,
        )

    def save(self, path: Path, model: ModelIdentity, version: str) -> None:
        """Write the network's file, for the option ``predictor``.

        Raises PredictorError if it cannot be written.
        """
        save_predictor(path, self.card(model, version), self.network)

    def _begin(self, gates: Sequence[Gate]) -> None:
        found = weights_of(gates, self.sizes.hidden, self._device)
        self._weights.copy_(found.weights)
        self._gates = GateWeights(self._weights, found.biases, found.correction, found.scoring)
        for network in (self.network, self._candidate):  # in place: graphs may have captured the tensors
            ask_next_gates(network, self._gates, self.sizes.top_k)
        self._take_before()
        self._before = None

    def _take_before(self) -> None:
        for name, tensor in ({} if self._before is None else self._before.tensors).items():
            if name in self.network.tensors:
                self.network.tensors[name].copy_(tensor)

    def _end_block(self, gates: Sequence[Gate]) -> bool:
        assert self._gates is not None
        x, experts, better = self._x[:, : self._filled], self._experts[:, : self._filled], False
        self._filled = 0
        ones = torch.ones((), dtype=torch.float32, device=self._device).expand(experts.shape).flatten(1)
        self._counts.scatter_add_(1, experts.flatten(1).long().clamp(0, self.sizes.num_experts - 1), ones)
        if self._judging:
            self._judge(x, experts, gates)
            better = self._judged_on >= self.judged_tokens and self._decide()
        self._sums.add(self._gates, x, experts)
        if self._sums.tokens >= self.due and not self._judging and self._solving is None:
            self._solving, self._trained_on = iter(self._sums.layers), self._sums.tokens
        return better

    def _solve_a_layer(self) -> None:
        assert self._solving is not None
        assert self._gates is not None
        layer = next(self._solving, None)
        if layer is not None:
            self._sums.solve(layer, self._gates, self._candidate)
            return
        self._solving, self._judging, self._judged_on = None, True, 0
        self._judged.zero_()

    def _judge(self, x: torch.Tensor, experts: torch.Tensor, gates: Sequence[Gate]) -> None:
        for layer in self._sums.layers:
            here, chosen, later = x[layer], experts[layer].long(), experts[layer + 1].long()
            named, _ = gates[layer + 1].best(here, self.sizes.top_k)
            answers = (
                hits(self._candidate.logits(layer + 1, chosen, here), later),
                hits(self.network.logits(layer + 1, chosen, here), later),
                hits_of(named, later),
            )
            for who, (right, whole) in enumerate(answers):
                self._judged[who, 0, layer] += right.sum()
                self._judged[who, 1, layer] += whole.sum()
        self._judged_on += x.shape[1]

    def _decide(self) -> bool:
        """Adopt the candidate's layers or drop them, and begin the next round."""
        sums, top_k = self._sums, self.sizes.top_k
        rates = self._judged[:, :, sums.layers.start : sums.layers.stop].double().cpu() / self._judged_on
        rates[:, 0] /= top_k
        right, whole = rates.mean(-1).T.tolist()
        better = right[_CANDIDATE] > max(right[_INCUMBENT], right[_GATE])
        verdict = Verdict(sums.layers, self._trained_on, self._judged_on, tuple(right), tuple(whole), better)
        self.verdicts.append(verdict)
        if better:
            self._rates[:, :, sums.layers.start : sums.layers.stop] = rates[[_CANDIDATE, _GATE]].float()
            self._adopt(sums.layers)
        self._judging = False
        self._group += 1
        if self._group == len(self._groups):
            self._group, self.due = 0, 2 * self.due
        if len(self._groups) > 1:
            self._sums = None  # type: ignore[assignment]  # two would exceed the budget
            self._sums = self._new_sums()
        return better

    def _adopt(self, layers: range) -> None:
        """Write the candidate's layers in place.

        A predictor in use continues with the better ones.
        """
        for name, tensor in self.network.tensors.items():
            if name.startswith(("tables", "gates")):
                tensor[layers.start : layers.stop] = self._candidate.tensors[name][layers.start : layers.stop]
        self.network.popularity.copy_(self._counts / self._counts.sum(-1, keepdim=True).clamp(min=1))

    def _new_sums(self) -> LeastSquares:
        return LeastSquares(self.sizes, self._groups[self._group], self.look_ahead, self._device)


def network_bytes(sizes: ModelIdentity, look_ahead: int, item: int) -> int:
    """Return the bytes of a network with numbers of ``item`` bytes and a correction."""
    look_ahead = min(look_ahead, sizes.num_layers - 1)
    pairs = sum(sizes.num_layers - ahead for ahead in range(1, look_ahead + 1))
    return item * sizes.num_experts * (pairs * (sizes.num_experts + sizes.hidden) + 2 * sizes.num_layers)
