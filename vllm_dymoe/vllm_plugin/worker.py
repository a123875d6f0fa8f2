"""Methods that every vLLM worker gets.

They are called through ``LLM.collective_rpc``, ``/collective_rpc`` and :mod:`~.endpoint`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_dymoe.options import ConfigError
from vllm_dymoe.prefetch import PredictorError
from vllm_dymoe.quantize.recording import CalibrationError
from vllm_dymoe.server import ExpertServer, precision_of
from vllm_dymoe.server.live import live_state
from vllm_dymoe.vllm_plugin.graphs import OVER_STEPS
from vllm_dymoe.vllm_plugin.rank_server import RankServer


class DymoeWorkerExtension:
    """A mixin for vLLM's worker; each method runs on every rank, between two steps."""

    def dymoe_stats(self) -> dict[str, Any]:
        """Return the counts since the first request.

        They are a :class:`~vllm_dymoe.server.stats.ServerStats` as data.
        """
        return _server(self).stats().to_dict()

    def dymoe_reset_stats(self) -> None:
        _server(self).reset_stats()

    def dymoe_resize(
        self, expert_budget: str | int | float | None = None, host_memory: str | int | float | None = None
    ) -> dict[str, Any]:
        """Change ``expert_budget`` and ``host_memory``.

        Both are checked before either changes, so on a ValueError the old values stay on this rank; see
        ``dymoe_check`` for several ranks. A smaller cache starts empty and frees memory. Returns ``dymoe_stats``, and
        ``free_device_bytes``.
        """
        server = _server(self)
        server.check_budgets(expert_budget, host_memory)
        if host_memory is not None:
            server.resize_host_memory(host_memory)
        if expert_budget is not None:
            server.resize(expert_budget)
        return {**server.stats().to_dict(), "free_device_bytes": server.cache.pools.available}

    def dymoe_precision(self, /, **changes: Any) -> dict[str, Any]:
        """Change ``high``, ``low`` or a parameter of the policy.

        ``high`` and ``low`` change among the stored bit-widths. The change applies from the next step on. Returns what
        is in force now. On a ValueError nothing changes on this rank; see ``dymoe_check`` for several ranks.
        """
        server = _server(self)
        if changes:
            server.set_precision(**changes)
        return dict(precision_of(server))

    def dymoe_check(self, method: str, changes: dict[str, Any]) -> None:
        """Raise ValueError if ``dymoe_resize`` or ``dymoe_precision`` would.

        Nothing changes. Call it before a change if there are several ranks: one may refuse what the others do.
        """
        server = _server(self)
        checks: dict[str, Callable[..., None]] = {
            "dymoe_resize": server.check_budgets,
            "dymoe_precision": server.check_precision,
        }
        checks[method](**changes)

    def dymoe_live(self) -> dict[str, Any]:
        """Return what the live page shows; see :func:`~vllm_dymoe.server.live.live_state`."""
        rank = _rank(self)
        return live_state(rank.server, rank.step.computed)

    def dymoe_recordable(self) -> dict[str, Any] | None:
        """Return the description of a calibration of this model.

        None on all ranks except the one that records.
        """
        return _rank(self).observation.recordable

    def dymoe_record(self, path: str, tokens: int) -> str | None:
        """Record the experts' inputs of the next tokens as one part of a calibration.

        Return an error message or None.
        """
        rank = _rank(self)
        if _replays_steps(self):
            return "a CUDA graph over a decode step keeps no inputs of routers; start with --enforce-eager"
        return _problem(lambda: rank.observation.record(Path(path), tokens))

    def dymoe_record_end(self) -> str | None:
        return _problem(_rank(self).observation.end_record)

    def dymoe_trace(self) -> dict[str, Any] | None:
        """Write what has been recorded so far, and return where and how much.

        None on a rank that records nothing.
        """
        trace = _rank(self).observation.trace
        if trace is None:
            return None
        recorder = trace.recorder
        recorder.flush()
        found = {"tokens": recorder.tokens, "recording": recorder.recording, "bytes": recorder.nbytes}
        return {"folder": str(recorder.folder), **found}

    def dymoe_predictor(self) -> dict[str, Any] | None:
        """Write the predictor that is trained while serving.

        It is written if it has become better than the next gate. Returns its file, whether it was written, the tokens
        seen, and once there is one the share of experts that it and the next gate predict, on tokens that it was not
        trained on; None without ``train_predictor``. ValueError if the file cannot be written.
        """
        training = _rank(self).training
        if training is None:
            return None
        try:
            return {**training.report(), "asked": _server(self).asks_trained}
        except PredictorError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error

    def dymoe_check_integrity(self) -> None:
        """Raise AssertionError if a slot, pin or byte of the budget is unaccounted for."""
        _server(self).check_integrity()


def _rank(worker: Any) -> RankServer:
    return worker.vllm_config.quant_config.loaded_model()


def _replays_steps(worker: Any) -> bool:
    return worker.vllm_config.compilation_config.cudagraph_mode in OVER_STEPS


def _server(worker: Any) -> ExpertServer:
    return _rank(worker).server


def _problem(action: Callable[[], None]) -> str | None:
    """Return the message of an error of ours.

    As an exception it would reach the caller as another one.
    """
    try:
        action()
    except CalibrationError as error:
        return str(error)
    return None
