"""Predictors as tensor operations alone: what a captured step can hold (DuoServe-MoE 5.3, inside a CUDA graph)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vllm_dymoe.predict.base import Predictor
from vllm_dymoe.predict.folded import FoldedMLP
from vllm_dymoe.predict.gate import Gate
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.predict.trained import TrainedPredictor


class OnDevice(Protocol):
    """Names the next layer's experts without a host.

    Attributes:
        guesses: experts that are named for each token.
    """

    guesses: int

    def foresee(self, layer: int, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Name experts of the layer behind one; called for the layers of a step in order, but for the last.

        Args:
            layer: that is computed.
            x: [tokens, hidden], its router's input. Rows that only fill up a batch may hold anything.
            ids: int [tokens, top_k], this rank's experts that it chose, negative for another rank's.

        Returns:
            This rank's experts, int64 [tokens, guesses], negative for another rank's, and how likely each is, float32
            from 0 to 1.
        """
        ...


class GatesOnDevice:
    """The next layer's gate on this layer's input (DyMoE 4.4.1, Eq. 8).

    Args:
        gates: of every MoE layer, in order.
        amount: experts to name for each token.
        device: of all.
    """

    def __init__(self, gates: Sequence[Gate], amount: int, device: torch.device) -> None:
        self._gates, self.guesses = gates, amount
        self._local = [None if gate.local is None else torch.tensor(gate.local, device=device) for gate in gates]

    def foresee(self, layer: int, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`OnDevice`."""
        experts, scores = self._gates[layer + 1].best(x, self.guesses)
        local = self._local[layer + 1]
        here = experts if local is None else local[experts]
        return here, scores.clamp(0, 1)  # corrected scores may be anything


class NetworkOnDevice:
    """A trained network, which is told what the layers before chose.

    Args:
        network: of the model that runs, on its device.
        amount: experts to name for each token.
    """

    def __init__(self, network: FoldedMLP, amount: int) -> None:
        self._network, self.guesses = network, amount
        self._past: Tensor | None = None

    def foresee(self, layer: int, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`OnDevice`."""
        network = self._network
        chosen = ids.clamp(min=0)  # rows that fill up a batch may have none
        self._past = network.remember(chosen, None if layer == 0 else self._past)
        best = network.logits(layer + 1, self._past, None if network.gates is None else x).topk(self.guesses)
        return best.indices, best.values.float().sigmoid()


def on_device(predictor: Predictor | None, device: torch.device) -> OnDevice | None:
    """A predictor in a captured step; None for one that needs the host, or none."""
    if isinstance(predictor, NextGate):
        return GatesOnDevice(predictor.gates, predictor.decode_experts, device)
    return NetworkOnDevice(predictor.network, predictor.amount) if isinstance(predictor, TrainedPredictor) else None
