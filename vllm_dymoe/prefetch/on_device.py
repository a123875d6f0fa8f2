"""Predictors of device-planned steps: they write ``Table.predicted`` without the host.

A predictor runs on a branch of the captured step while a layer is computed, and ``executor/device_prefetch.py`` fetches
the predicted experts. Any number of experts may be predicted; those without a slot or time are not fetched.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Table


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

    def observe(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Enqueue learning from a layer of a large batch; must not need the host.

        Args:
            x: [tokens, hidden], the router's input.
            ids: int [tokens, top_k], negative where another rank has the expert.
            rows: int32 [1], number of real tokens, which come first.
        """

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Enqueue learning from a layer of a small batch and, unless it is the last, a prediction for the next one.

        Writes ``Table.predicted[:, layer + 1]``; arguments as for :meth:`observe`.
        """


MakeDevicePredictor = Callable[[Table, int], DevicePredictor]
"""Makes a predictor for a table and the experts of a token."""


class AllExpertsOnDevice(DevicePredictor):
    """Predicts all experts of every layer, as MoESys does (a baseline of DuoServe-MoE, section 6.1)."""

    def __init__(self, table: Table, top_k: int) -> None:
        super().__init__(table, top_k)
        table.predicted[0] = torch.arange(table.experts, device=table.predicted.device)
        table.predicted[1] = HIGH


class PopularityOnDevice(DevicePredictor):
    """Predicts the experts that the next layer chose most often (DuoServe-MoE Eq. 2).

    Does the same as ``popularity.Popularity``.

    Old steps fade: after about 700 steps a step counts half. Counts are integers, like everything that a device
    compares.
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
        count_uses(self._counts, layer, ids, rows, self.FADE, self.UNIT)

    def predict(self, layer: int, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        count_and_name = _count_and_name_on(self._counts.device)
        given = self._counts, self._table.predicted[0], layer, ids, rows, self.FADE, self.UNIT, self._top_k
        count_and_name(*given)


@cache
def _count_and_name_on(device: torch.device) -> Callable[..., None]:
    if device.type == "cpu":
        return count_and_name
    # Importing triton takes a second, and only a GPU needs it.
    from vllm_dymoe.kernels.triton.popularity import count_and_name_on_gpu

    return count_and_name_on_gpu


def count_uses(counts: Tensor, layer: int, ids: Tensor, rows: Tensor, fade: int, unit: int) -> None:
    """Count the uses of a layer's step in ``counts``, int64 [layers, experts], with torch and without the host."""
    real = torch.arange(len(ids), device=ids.device)[:, None] < rows
    # The last element is for what is not counted.
    uses = torch.zeros(counts.shape[1] + 1, dtype=torch.int64, device=ids.device)
    place = torch.where(real & (ids >= 0), ids, counts.shape[1]).long().flatten()
    uses.scatter_add_(0, place, torch.full_like(place, unit))
    of_layer = counts[layer]
    of_layer -= torch.where(rows > 0, of_layer >> fade, 0)
    of_layer += uses[:-1]


def count_and_name(
    counts: Tensor, predicted: Tensor, layer: int, ids: Tensor, rows: Tensor, fade: int, unit: int, named: int
) -> None:
    """Count a small batch's step, and predict the next layer's favourites; see ``kernels/triton/popularity.py``."""
    count_uses(counts, layer, ids, rows, fade, unit)
    if layer + 1 < len(counts):
        wanted, experts = counts[layer + 1].sort(descending=True, stable=True)
        of_next = predicted[layer + 1, : min(named, len(experts))]
        of_next.copy_(torch.where(wanted > 0, experts, -1)[: len(of_next)])
