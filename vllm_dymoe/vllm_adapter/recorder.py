"""Recording what a running model's experts read: one part of a calibration at a time."""

from pathlib import Path

import torch

from vllm_dymoe.quantize.recording import CalibrationError, PartWriter


class Recorder:
    """Hands every layer's inputs to a part; what goes wrong is said at the end, and fails no request.

    Args:
        path: of the complete part.
        tokens: how many to record.
        layers: number of MoE layers.
        hidden: width of the inputs.
        top_k: experts of a token.
        dtype: of the inputs.

    Raises:
        CalibrationError: the part cannot be written.
    """

    def __init__(self, path: Path, tokens: int, *, layers: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
        self._part = PartWriter(path, layers, hidden, top_k, dtype, tokens)
        self._problem: CalibrationError | None = None

    def see(self, layer: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Record the inputs x [tokens, hidden] of one layer, and weights and experts [tokens, top_k], of all ranks."""
        if self._problem is not None:
            return
        try:
            self._part.add(layer, x, topk_weights, topk_ids)
        except CalibrationError as error:
            self._problem = error

    def finish(self) -> None:
        """Complete the part.

        Raises:
            CalibrationError: it could not be written, or tokens are missing.
        """
        if self._problem is not None:
            self._part.discard()
            raise self._problem
        self._part.finish()

    def discard(self) -> None:
        """Give up."""
        self._part.discard()
