"""Methods that every vLLM worker gets, for ``LLM.collective_rpc`` and ``/collective_rpc``, and an HTTP route to one.

vLLM loads routes only if ``VLLM_PLUGINS`` names them. The path begins with ``/v1``, which is what ``--api-key`` guards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from vllm_dymoe.quantize.recording import CalibrationError
from vllm_dymoe.server import ExpertServer, precision_of
from vllm_dymoe.vllm_plugin.rank_server import RankServer

PATH = "/v1/dymoe/precision"


class DymoeWorkerExtension:
    """vLLM mixes this class into its worker; each method runs on every rank, between two steps."""

    def dymoe_stats(self) -> dict[str, Any]:
        """A :class:`~vllm_dymoe.server.stats.ServerStats` as data, since the first request."""
        return _server(self).stats().to_dict()

    def dymoe_reset_stats(self) -> None:
        _server(self).reset_stats()

    def dymoe_resize(
        self, expert_budget: str | int | float | None = None, host_memory: str | int | float | None = None
    ) -> dict[str, Any]:
        """Change ``expert_budget`` and ``host_memory``; what is smaller starts empty and gives memory back.

        Returns ``dymoe_stats``, and ``free_device_bytes``. ValueError if it cannot be had; the old one stays.
        """
        server = _server(self)
        if host_memory is not None:
            server.resize_host_memory(host_memory)
        if expert_budget is not None:
            server.resize(expert_budget)
        return {**server.stats().to_dict(), "free_device_bytes": server.cache.pools.available}

    def dymoe_precision(self, /, **changes: Any) -> dict[str, Any]:
        """Change ``high`` or ``low`` among the stored bit-widths, or a parameter of the policy, from the next step on.

        Returns what is in force now. ValueError if a value cannot be honoured; all stays as it was.
        """
        server = _server(self)
        if changes:
            server.set_precision(**changes)
        return dict(precision_of(server))

    def dymoe_recordable(self) -> dict[str, Any] | None:
        """What a calibration of this model is about; None on all ranks but the one that records."""
        return _rank(self).observation.recordable

    def dymoe_record(self, path: str, tokens: int) -> str | None:
        """Record what experts read in the next tokens as one part of a calibration; returns what went wrong."""
        rank = _rank(self)
        if rank.server.small_batches is not None:
            return 'the device plans about experts in decode, and keeps no inputs; start with planning "host"'
        return _problem(lambda: rank.observation.record(Path(path), tokens))

    def dymoe_record_end(self) -> str | None:
        return _problem(_rank(self).observation.end_record)

    def dymoe_trace(self) -> dict[str, Any] | None:
        """Write what has been recorded so far, and say where and how much; None on a rank that records nothing."""
        trace = _rank(self).observation.trace
        if trace is None:
            return None
        recorder = trace.recorder
        recorder.flush()
        found = {"tokens": recorder.tokens, "recording": recorder.recording, "bytes": recorder.nbytes}
        return {"folder": str(recorder.folder), **found}

    def dymoe_check_integrity(self) -> None:
        """Raise AssertionError if a slot, pin or byte of the budget is unaccounted for."""
        _server(self).check_integrity()


def _rank(worker: Any) -> RankServer:
    return worker.vllm_config.quant_config.loaded_model()


def _server(worker: Any) -> ExpertServer:
    return _rank(worker).server


def _problem(action: Callable[[], None]) -> str | None:
    """What went wrong: an exception would reach the caller as another one."""
    try:
        action()
    except CalibrationError as error:
        return str(error)
    return None


class PrecisionEndpoint:
    """``GET`` asks what is in force, ``POST`` with an object of changes makes them; see ``dymoe_precision``."""

    name = "dymoe"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        @app.get(PATH)
        async def ask(request: Request) -> dict[str, Any]:
            return await _call(request.app.state, {})

        @app.post(PATH)
        async def change(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
            return await _call(request.app.state, changes)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.dymoe_engine = engine_client


async def _call(state: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The answers of all ranks; a sentence of ours is the client's mistake."""
    try:
        return {"ranks": await state.dymoe_engine.collective_rpc("dymoe_precision", kwargs=changes)}
    except Exception as error:
        _, ours, sentence = str(error).partition("vllm-dymoe: ")
        if not ours:
            raise
        # What vLLM's executor adds is of no use to the client.
        raise HTTPException(400, ours + sentence.partition("', please check the stack trace")[0]) from error
