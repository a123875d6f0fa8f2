"""Adding up the errors of experts while they are packed, by any number of threads."""

import math
import threading
from collections import defaultdict
from typing import Any

from torch import Tensor

from vllm_dymoe.experts.layout import ModelExperts, Projection
from vllm_dymoe.kernels import MatrixFormat
from vllm_dymoe.quantize.base import Codes, dequantized
from vllm_dymoe.quantize.gptq import Curvature
from vllm_dymoe.store import ErrorRecord

_Matrices = dict[tuple[int, ...], tuple[float, float]]
_Squares = dict[tuple[int, int], _Matrices]


class ErrorTally:
    """The errors of one store, as far as it is packed.

    Args:
        experts: what the store will hold.
    """

    def __init__(self, experts: ModelExperts) -> None:
        self._layers = len(experts.layers)
        self._lock = threading.Lock()
        # (layer, bits) -> squares of an expert's projection: of its error, and of itself.
        self._weight: _Squares = defaultdict(dict)
        self._output: _Squares = defaultdict(dict)
        self._fallbacks: set[tuple[int, int]] = set()

    def add(
        self,
        place: tuple[int, int, Projection],
        weight: Tensor,
        codes: Codes,
        format: MatrixFormat,
        curvature: Curvature | None,
    ) -> None:
        """Count one projection at one bit-width.

        Args:
            place: position of the layer, expert, and which of its matrices.
            weight: [rows, columns], what the codes stand for.
            codes: as chosen.
            format: of the packed matrix.
            curvature: of the inputs, if they are known.
        """
        layer, *matrix = place
        weight = weight.float()
        difference = dequantized(codes, format).sub_(weight)
        squares = _square(difference), _square(weight)
        outputs = (curvature.output_norm(difference), curvature.output_norm(weight)) if curvature else None
        with self._lock:
            self._weight[layer, format.bits][tuple(matrix)] = squares
            if outputs is not None:
                self._output[layer, format.bits][tuple(matrix)] = outputs

    def fell_back(self, layer: int, expert: int) -> None:
        """Note an expert for which the calibration was not used."""
        with self._lock:
            self._fallbacks.add((layer, expert))

    def of_layer(self, layer: int) -> Any:
        """What was counted of one layer, as JSON data."""
        with self._lock:
            squares = [
                [kind, bits, list(found[place, bits].items())]
                for kind, found in enumerate((self._weight, self._output))
                for place, bits in sorted(found)
                if place == layer
            ]
            return {"squares": squares, "fallbacks": sorted(e for place, e in self._fallbacks if place == layer)}

    def restore(self, layer: int, counted: Any) -> None:
        """Take back what ``of_layer`` gave."""
        with self._lock:
            for kind, bits, matrices in counted["squares"]:
                found = (self._weight, self._output)[kind]
                found[layer, bits] = {tuple(matrix): tuple(squares) for matrix, squares in matrices}
            self._fallbacks |= {(layer, expert) for expert in counted["fallbacks"]}

    def record(self) -> ErrorRecord:
        """The errors so far; in whatever order they came, the same."""
        by_layer: list[list[int]] = [[] for _ in range(self._layers)] if self._fallbacks else []
        for layer, expert in sorted(self._fallbacks):
            by_layer[layer].append(expert)
        return ErrorRecord(self._relative(self._weight), self._relative(self._output), tuple(map(tuple, by_layer)))

    def _relative(self, squares: _Squares) -> dict[int, tuple[float, ...]]:
        widths = sorted({bits for _, bits in squares}, reverse=True)
        return {bits: tuple(_ratio(squares[layer, bits]) for layer in range(self._layers)) for bits in widths}


def _square(values: Tensor) -> float:
    return float(values.flatten().dot(values.flatten()))


def _ratio(squares: _Matrices) -> float:
    error = math.fsum(error for error, _ in squares.values())
    whole = math.fsum(whole for _, whole in squares.values())
    return math.sqrt(error / whole) if whole else 0.0
