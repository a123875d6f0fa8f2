"""Predictors of device-planned steps, which write ``Table.predicted``.

They run on the device, without the host: on a branch of the captured step while a layer is computed.
``executor/device_prefetch.py`` fetches the predicted experts. Any number of experts may be predicted; those without a
slot or time are not fetched.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS, experts_width
from vllm_dymoe.planner.prefetch import MOST_AHEAD, PredictionCount, name_experts
from vllm_dymoe.planner.rule import HIGH, Ints
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.folded import FoldedMLP
from vllm_dymoe.prefetch.gate import Gate
from vllm_dymoe.prefetch.tuner import Heop


class DevicePredictor:
    """Predicts experts of the next layer; this base class predicts nothing.

    Args:
        table: the device's, whose column ``predicted`` the predictor writes.
    """

    def __init__(self, table: Table, top_k: int) -> None:
        self._table, self._top_k = table, top_k

    @property
    def nbytes(self) -> int:
        """Device memory in bytes, without the table's."""
        return 0

    @property
    def look_ahead(self) -> int:
        """Number of coming layers for which it names experts: 1 or 2."""
        return 1

    def observe(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Enqueue learning from a layer of a large batch; must not need the host.

        Args:
            x: [tokens, hidden], the router's input.
            ids: int [tokens, top_k], negative where another rank has the expert.
            rows: int32 [1], number of real tokens, which come first.
        """

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Enqueue learning from a layer of a small batch, and a prediction.

        Nothing is predicted after the last layer. ``Table.predicted`` is written for the coming layers; arguments are
        as for :meth:`observe`.
        """

    def warm_up(self, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Compile and load kernels, while no row is a token.

        The gates may not exist yet. Arguments are as for the other methods.
        """

    @property
    def learns(self) -> int:
        """Number of decode steps after which it wants to :meth:`learn`; 0 for never."""
        return 0

    def learn(self, counts: Ints, steps: int) -> None:
        """Adjust to what predictions were worth, between steps.

        Args:
            counts: int64 [layers, PredictionCount], of ``steps`` decode steps.
        """


class NamesByScores(DevicePredictor):
    """Names the experts of the largest scores.

    The base of predictors that compute scores.

    Args:
        numbers: int32 [layers of the model, experts of all ranks], this rank's number of each, negative for another
            rank's.
        voters: how many layers' scores there are for each.
        look_ahead: for how many coming layers experts are named, of which a device fetches for two.
    """

    def __init__(self, table: Table, top_k: int, numbers: Tensor, voters: int = 1, look_ahead: int = 1) -> None:
        super().__init__(table, top_k)
        self._look_ahead = min(look_ahead, MOST_AHEAD)
        self._numbers, self._voters, device = numbers, voters, table.predicted.device
        self._layers = len(numbers)  # without a draft's
        self._asked = torch.tensor([[top_k, 1]], dtype=torch.int32, device=device).repeat(self._layers, 1)
        self._scratch = torch.zeros(experts_width(numbers.shape[1]), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes + self._asked.nbytes + self._scratch.nbytes

    def warm_up(self, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        if self._layers > 1:
            sizes = self._voters, len(x), self._numbers.shape[1]
            self._name(1, 0, torch.zeros(sizes, dtype=torch.float32, device=x.device), rows)

    @property
    def look_ahead(self) -> int:
        return self._look_ahead

    def _coming(self, layer: int) -> range:
        return range(layer + 1, min(layer + 1 + self._look_ahead, self._layers))

    def _name(self, target: int, layer: int, scores: Tensor, rows: Tensor) -> None:
        """Name experts of a coming layer by scores.

        ``scores`` is float32 [voters, tokens, experts of all ranks].
        """
        name = _name_experts_on(self._table.predicted.device)
        name(self._table, target, layer, scores.contiguous(), rows, self._asked, self._numbers, self._scratch)


class GatesOnDevice(NamesByScores):
    """Evaluates the next layers' gates on a layer's input (DyMoE 4.4.1).

    Predicts as ``next_gate.NextGate`` does.

    Args:
        gates: of every layer, in order.
    """

    def __init__(self, table: Table, top_k: int, gates: Sequence[Gate], look_ahead: int = 1) -> None:
        super().__init__(table, top_k, numbers_of(gates, table), look_ahead=look_ahead)
        self._gates = gates

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        for later in self._coming(layer):
            self._name(later, layer, self._gates[later].scores(x)[None], rows)


class VotingOnDevice(NamesByScores):
    """Evaluates the next layer's gate on the inputs of several layers (FIRM-MoE).

    Predicts as ``meeting_of_layers`` does. K and P are values on the device, which HEOP changes between steps.

    Args:
        gates: of every layer, in order.
        setting: K and P to begin with.
        tuner: changes them; None if they stay.
        inputs: [P or more, rows of a small batch, hidden], overwritten with the inputs of the last layers.
    """

    def __init__(
        self, table: Table, top_k: int, gates: Sequence[Gate], setting: tuple[int, int], tuner: Heop | None,
        inputs: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(table, top_k, numbers_of(gates, table), len(inputs))
        self._gates, self._tuner, self._inputs = gates, tuner, inputs
        self._asked[:] = torch.tensor(setting, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._inputs.nbytes

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        inputs = self._inputs[:, : len(x)]
        inputs[layer % self._voters].copy_(x)
        if layer + 1 < self._layers:
            scores = self._gates[layer + 1].scores(inputs.flatten(0, 1))
            self._name(layer + 1, layer, scores.view(self._voters, len(x), -1), rows)

    @property
    def learns(self) -> int:
        return 0 if self._tuner is None else self._tuner.update_every

    def learn(self, counts: Ints, steps: int) -> None:
        assert self._tuner is not None
        unused, held = counts[:, PredictionCount.UNUSED], counts[:, PredictionCount.HELD]
        missed = counts[:, PredictionCount.NEEDED] - counts[:, PredictionCount.CORRECT]
        for layer, asked in enumerate(counts[: self._layers, PredictionCount.ASKED].tolist()):
            found = {"unused": int(unused[layer]), "missed": int(missed[layer]), "hits": int(held[layer])}
            if asked:
                self._tuner.record(layer, **found, steps=asked)
        self._tuner.end_step(steps)
        settings = [self._tuner.setting(layer) for layer in range(self._layers)]
        self._asked.copy_(torch.tensor(settings, dtype=torch.int32))


class NetworkOnDevice(NamesByScores):
    """Evaluates a trained network (DuoServe-MoE 5.3).

    Predicts as ``trained.TrainedPredictor`` does.

    Args:
        network: its tensors may change between steps, and a captured graph then reads the new ones.
    """

    def __init__(self, table: Table, top_k: int, network: FoldedMLP) -> None:
        device = table.predicted.device
        numbers = torch.arange(table.experts, dtype=torch.int32, device=device).repeat(network.num_layers, 1)
        super().__init__(table, top_k, numbers, look_ahead=network.look_ahead)
        self._network, self._past = network, torch.empty(0)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._network.nbytes

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        network, coming = self._network, self._coming(layer)
        if not coming:
            return
        chosen = ids.clamp(0, network.num_experts - 1)  # rows that are no tokens have other numbers, or none
        self._past = network.remember(chosen, self._past if layer else None)
        for later in coming:
            scores = network.logits(later, self._past, x, ahead=later - layer).float()
            if network.correction is None:
                scores = scores.softmax(-1)
            self._name(later, layer, scores[None], rows)


def numbers_of(gates: Sequence[Gate], table: Table) -> Tensor:
    """Return this rank's number of every expert: int32 [layers, experts of all ranks].

    Numbers are negative for another rank's experts.
    """
    numbers = [range(table.experts) if gate.local is None else gate.local for gate in gates]
    return torch.tensor([[*of] for of in numbers], dtype=torch.int32, device=table.predicted.device)


@cache
def _name_experts_on(device: torch.device) -> Callable[..., None]:
    if device.type == "cpu":
        return lambda table, target, layer, scores, rows, asked, numbers, scratch: name_experts(
            table, target, layer, scores, rows, asked, numbers
        )
    # Importing triton takes a second, which only a GPU needs.
    from vllm_dymoe.kernels.triton.prefetch import name_experts_on_gpu

    return lambda table, *arguments: name_experts_on_gpu(vars(table), *arguments)


class AllExpertsOnDevice(DevicePredictor):
    """Predicts all experts of every layer, as MoESys does.

    A baseline of DuoServe-MoE, section 6.1.
    """

    def __init__(self, table: Table, top_k: int) -> None:
        super().__init__(table, top_k)
        table.predicted[0] = torch.arange(table.experts, device=table.predicted.device)
        table.predicted[1] = HIGH


class PopularityOnDevice(DevicePredictor):
    """Predicts the experts that the next layer chose most often.

    This is DuoServe-MoE's Eq. 2, as in ``popularity.Popularity``. Old steps fade: after about 700 steps a step counts
    half. Counts are integers, like everything that a device compares.
    """

    FADE, UNIT = 10, 1 << 20  # a step subtracts a share of 2 ** -10; sums of any number of uses stay below 2 ** 63

    def __init__(self, table: Table, top_k: int) -> None:
        super().__init__(table, top_k)
        self._counts = torch.zeros(table.layers, table.experts, dtype=torch.int64, device=table.predicted.device)
        table.predicted[1] = HIGH

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def observe(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        self._count_and_name(layer, ids, rows, 0)

    def warm_up(self, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        self.predict(0, x, ids, rows)
        self.observe(0, x, ids.expand(SMALL_BATCH_ROWS + 1, -1), rows)

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        self._count_and_name(layer, ids, rows, self._top_k)

    def _count_and_name(self, layer: int, ids: Tensor, rows: Tensor, named: int) -> None:
        count_and_name = _count_and_name_on(self._counts.device)
        count_and_name(self._counts, self._table.predicted[0], layer, ids, rows, self.FADE, self.UNIT, named)


@cache
def _count_and_name_on(device: torch.device) -> Callable[..., None]:
    if device.type == "cpu":
        return count_and_name
    # Importing triton takes a second, and only a GPU needs it.
    from vllm_dymoe.kernels.triton.popularity import count_and_name_on_gpu

    return count_and_name_on_gpu


def count_and_name(
    counts: Tensor, predicted: Tensor, layer: int, ids: Tensor, rows: Tensor, fade: int, unit: int, named: int
) -> None:
    """Count a layer's step, and predict the next layer's favourites.

    See ``kernels/triton/popularity.py``.
    """
    real = torch.arange(len(ids), device=ids.device)[:, None] < rows
    # The last element is for what is not counted.
    uses = torch.zeros(counts.shape[1] + 1, dtype=torch.int64, device=ids.device)
    place = torch.where(real & (ids >= 0), ids, counts.shape[1]).long().flatten()
    uses.scatter_add_(0, place, torch.full_like(place, unit))
    of_layer = counts[layer]
    of_layer -= torch.where(rows > 0, of_layer >> fade, 0)
    of_layer += uses[:-1]
    if layer + 1 < len(counts):
        wanted, experts = counts[layer + 1].sort(descending=True, stable=True)
        of_next = predicted[layer + 1, : min(named, len(experts))]
        of_next.copy_(torch.where(wanted > 0, experts, -1)[: len(of_next)])
