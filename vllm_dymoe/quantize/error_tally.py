"""Sums the quantization errors of experts while they are packed.

Any number of threads may pack them.
"""

import math
from typing import Any

from torch import Tensor

from vllm_dymoe.cache.store import ErrorRecord
from vllm_dymoe.experts.format import ModelExperts, Projection
from vllm_dymoe.quantize.gptq import Curvature

_WEIGHT, _OUTPUT, _MASS = range(3)


class ErrorTally:
    """The errors of the packed part of a store.

    Threads may add different projections.
    """

    def __init__(self, experts: ModelExperts) -> None:
        # By layer: (kind, bits, expert, projection) -> sums of squares of the error, and of the quantity it is relative
        # to.
        self._squares: list[dict[tuple[int, ...], tuple[float, float]]] = [{} for _ in experts.layers]
        self._fallbacks: list[list[int]] = [[] for _ in experts.layers]

    def add(
        self,
        place: tuple[int, int, Projection],
        weight: Tensor,
        restored: Tensor,
        bits: int,
        curvature: Curvature | None,
    ) -> None:
        """Count one projection at one bit-width.

        Given the curvature of its inputs, the errors of its outputs are counted as well. ``restored`` is the
        dequantized matrix at these bits, float32 [rows, columns], and is overwritten.
        """
        layer, *matrix = place
        weight = weight.float()
        difference = restored.sub_(weight)
        self._squares[layer][_WEIGHT, bits, *matrix] = _square(difference), _square(weight)
        if curvature is not None:
            norms = curvature.output_norm(difference), curvature.output_norm(weight)
            self._squares[layer][_OUTPUT, bits, *matrix] = norms
            self._squares[layer][_MASS, bits, *matrix] = curvature.mass, 0.0

    def fell_back(self, layer: int, experts: list[int]) -> None:
        """Record the experts of a layer for which the calibration was not used."""
        self._fallbacks[layer] = sorted(experts)

    def of_layer(self, layer: int) -> Any:
        """Return the counts of a complete layer, as JSON data."""
        return {"squares": list(self._squares[layer].items()), "fallbacks": self._fallbacks[layer]}

    def restore(self, layer: int, counted: Any) -> None:
        self._fallbacks[layer] = counted["fallbacks"]
        self._squares[layer] = {tuple(matrix): tuple(squares) for matrix, squares in counted["squares"]}

    def record(self) -> ErrorRecord:
        fallbacks = tuple(map(tuple, self._fallbacks))
        experts = {
            bits: tuple(_lost_by_experts(layer, bits) for layer in self._squares) for bits in self._relative(_OUTPUT)
        }
        rare = fallbacks if any(fallbacks) else ()
        return ErrorRecord(self._relative(_WEIGHT), self._relative(_OUTPUT), rare, experts)

    def _relative(self, kind: int) -> dict[int, tuple[float, ...]]:
        widths = sorted({bits for layer in self._squares for of, bits, *_ in layer if of == kind}, reverse=True)
        return {bits: tuple(_ratio(layer, kind, bits) for layer in self._squares) for bits in widths}


def _lost_by_experts(layer: dict[tuple[int, ...], tuple[float, float]], bits: int) -> tuple[float, ...]:
    """Return for each expert the sum of the relative errors of its matrices' outputs.

    The sum is multiplied by the mean square of its down projection's output at routing weight 1.
    """
    count = 1 + max((expert for _, _, expert, _ in layer), default=-1)
    lost = [0.0] * count
    for (kind, width, expert, _), (error, whole) in sorted(layer.items()):
        if (kind, width) == (_OUTPUT, bits) and whole:
            lost[expert] += error / whole
    for expert in range(count):
        place = bits, expert, Projection.DOWN
        (_, whole), (mass, _) = layer.get((_OUTPUT, *place), (0, 0)), layer.get((_MASS, *place), (0, 0))
        lost[expert] *= whole / mass if mass else 0.0
    return tuple(lost)


def _square(values: Tensor) -> float:
    return float(values.flatten().dot(values.flatten()))


def _ratio(layer: dict[tuple[int, ...], tuple[float, float]], kind: int, bits: int) -> float:
    found = [squares for (of, width, *_), squares in layer.items() if (of, width) == (kind, bits)]
    # fsum rounds once, so that the order of the work changes nothing.
    error, whole = (math.fsum(part) for part in zip(*found, strict=True)) if found else (0.0, 0.0)
    return math.sqrt(error / whole) if whole else 0.0
