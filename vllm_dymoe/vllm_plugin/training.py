"""Trains a rank's predictor while it serves.

This module says which steps count, who uses the predictor, and when it is written.
"""

import threading
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe import __version__
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.prefetch import Gate, PredictorError, TrainedPredictor
from vllm_dymoe.prefetch.online import OnlineTraining
from vllm_dymoe.prefetch.side_stream import make_side_stream
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.step import RunningStep


class ServedTraining:
    """One rank's training.

    Args:
        online: sums, candidate and network.
        model: for the file's card.
        gates: returns the model's gates once they were checked; empty before, and if they cannot be used.
        file: where the network is written; None on ranks that train the same as another.
    """

    def __init__(
        self, online: OnlineTraining, model: ModelIdentity, gates: Callable[[], Sequence[Gate]], file: Path | None
    ) -> None:
        self.online, self.file, self._model, self._gates = online, file, model, gates
        self._written = 0  # number of verdicts in the file
        self._writing = threading.Lock()
        # vLLM's workers are children of multiprocessing, which does not call atexit's functions at their end.
        self._at_exit = Finalize(self, self.close, exitpriority=10)

    def see(self, layer: int, x: torch.Tensor, experts: torch.Tensor) -> None:
        self.online.see(layer, x, experts)

    def end_step(self, step: RunningStep) -> TrainedPredictor | None:
        """Learn from a step that ran without a failure.

        Only decode steps count: the predictor is used in no others, and the first rows of prompts are all alike.

        Returns:
            a predictor, if one became better than the one in use.
        """
        gates = self._gates()
        if step.phase is not Phase.DECODE or not step.tokens or not gates:
            return None
        online, judged = self.online, len(self.online.verdicts)
        better = online.end_step(step.tokens, gates)
        for verdict in online.verdicts[judged:]:
            candidate, before, gate = verdict.accuracy
            logger.info(
                "vllm-dymoe: a predictor trained on %d tokens predicts %.1f %% of the experts of %d later ones, the "
                "next layer's gate %.1f %%, the predictor before it %.1f %% (layers %d to %d): it is %s.",
                verdict.trained_on, 100 * candidate, verdict.judged_on, 100 * gate, 100 * before,
                verdict.layers.start, verdict.layers.stop - 1, "adopted" if verdict.adopted else "not adopted",
            )  # fmt: skip
        if not better:
            return None
        # Written now, because a worker may be killed; in a thread, because a step must not wait for a disk.
        threading.Thread(target=self._save_or_warn, name="vllm-dymoe predictor", daemon=True).start()
        return self.predictor()

    def predictor(self) -> TrainedPredictor:
        """Return a predictor of the network that is trained, which changes in place."""
        network = self.online.network
        return TrainedPredictor(network, self.online.sizes.top_k, make_side_stream(network.tables.device))

    def save(self) -> bool:
        """Write the network if it has improved since the last time.

        Returns:
            whether the file has one.
        """
        if self.file is None or not self.online.trained:
            return False
        with self._writing:
            if self._written < (verdicts := len(self.online.verdicts)):
                self.online.save(self.file, self._model, __version__)
                self._written = verdicts
        return True

    def _save_or_warn(self) -> None:
        try:
            self.save()
        except PredictorError as error:
            logger.warning("vllm-dymoe: %s", error)

    def report(self) -> dict[str, Any]:
        """Write the file, and return the state of training.

        Raises:
            PredictorError: the file cannot be written.
        """
        written, metrics = self.save(), self.online.card(self._model, __version__).metrics
        found: dict[str, Any] = {"file": None if self.file is None else str(self.file)}
        found |= {"written": written, "tokens": self.online.tokens}
        if self.online.trained:
            found |= {"accuracy": metrics["trained"]["accuracy"], "next_gate": metrics["next gate"]["accuracy"]}
        return found

    def close(self) -> None:
        """Write the file when the engine shuts down."""
        self._at_exit.cancel()  # it keeps this object alive
        self._save_or_warn()
