"""Adding up the errors of experts while they are packed, by any number of threads."""

import math
import threading
from collections import defaultdict
from typing import Any

from torch import Tensor

from vllm_dymoe.quantize.gptq import Curvature
from vllm_dymoe.residency.format import ModelExperts, Projection
from vllm_dymoe.store import ErrorRecord

_WEIGHT, _OUTPUT = range(2)
_Matrices = dict[tuple[int, ...], tuple[float, float]]
"""(expert, projection) -> squares: of its error, and of itself."""


class ErrorTally:
    """The errors of one store, as far as it is packed."""

    def __init__(self, experts: ModelExperts) -> None:
        self._layers = len(experts.layers)
        self._lock = threading.Lock()
        self._squares: dict[tuple[int, int, int], _Matrices] = defaultdict(dict)  # by layer, kind, bits
        self._fallbacks: dict[int, list[int]] = {}

    def add(
        self,
        place: tuple[int, int, Projection],
        weight: Tensor,
        restored: Tensor,
        bits: int,
        curvature: Curvature | None,
    ) -> None:
        """Count one projection at one bit-width; with a curvature of its inputs also the errors of its outputs.

        Args:
            restored: float32 [rows, columns], what is read of it at these bits; overwritten.
        """
        layer, *matrix = place
        weight = weight.float()
        difference = restored.sub_(weight)
        squares = {_WEIGHT: (_square(difference), _square(weight))}
        if curvature is not None:
            squares[_OUTPUT] = curvature.output_norm(difference), curvature.output_norm(weight)
        with self._lock:
            for kind, found in squares.items():
                self._squares[layer, kind, bits][tuple(matrix)] = found

    def fell_back(self, layer: int, experts: list[int]) -> None:
        """Note the experts of a layer for which the calibration was not used."""
        with self._lock:
            self._fallbacks[layer] = sorted(experts)

    def of_layer(self, layer: int) -> Any:
        """What was counted of one layer, as JSON data."""
        with self._lock:
            squares = [
                [kind, bits, list(found.items())]
                for (place, kind, bits), found in sorted(self._squares.items())
                if place == layer
            ]
            return {"squares": squares, "fallbacks": self._fallbacks.get(layer, [])}

    def restore(self, layer: int, counted: Any) -> None:
        """Take back what ``of_layer`` gave."""
        self.fell_back(layer, counted["fallbacks"])
        with self._lock:
            for kind, bits, matrices in counted["squares"]:
                self._squares[layer, kind, bits] = {tuple(matrix): tuple(squares) for matrix, squares in matrices}

    def record(self) -> ErrorRecord:
        """The errors so far; in whatever order they came, the same."""
        fallbacks = tuple(tuple(self._fallbacks.get(layer, ())) for layer in range(self._layers))
        return ErrorRecord(self._relative(_WEIGHT), self._relative(_OUTPUT), fallbacks if any(fallbacks) else ())

    def _relative(self, kind: int) -> dict[int, tuple[float, ...]]:
        widths = sorted({bits for _, of, bits in self._squares if of == kind}, reverse=True)
        layers = range(self._layers)
        return {bits: tuple(_ratio(self._squares.get((layer, kind, bits), {})) for layer in layers) for bits in widths}


def _square(values: Tensor) -> float:
    return float(values.flatten().dot(values.flatten()))


def _ratio(squares: _Matrices) -> float:
    # fsum rounds once, so that the order of the work changes nothing.
    error = math.fsum(error for error, _ in squares.values())
    whole = math.fsum(whole for _, whole in squares.values())
    return math.sqrt(error / whole) if whole else 0.0
