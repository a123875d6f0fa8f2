"""HTTP routes to the workers' methods, and the live page that uses them.

vLLM loads them only if ``VLLM_PLUGINS`` names the plugin. ``--api-key`` guards every path that begins with ``/v1``. The
page itself is three static files without any state of the server, and asks its reader for the key.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.staticfiles import StaticFiles

from vllm_dymoe.vllm_plugin.rank_calls import call_ranks, patience

PRECISION, BUDGET, LIVE = "/v1/dymoe/precision", "/v1/dymoe/budget", "/v1/dymoe/live"
PREDICTOR = "/v1/dymoe/predictor"
PAGE = "/dymoe/live"
_PAGE_FILES = Path(__file__).parent / "live_page"
_INTERVAL_S = 1.0  # seconds between two requests of the live page to the workers


class DymoeEndpoint:
    """``GET`` returns the values in force; ``POST`` with an object changes them.

    Answers are lists over all ranks of all engines. A change that one rank refuses is made on none.

    See ``dymoe_precision``, ``dymoe_resize``, ``dymoe_predictor`` and ``dymoe_live`` of
    :class:`~.worker.DymoeWorkerExtension`.
    """

    name = "dymoe"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        @app.get(PRECISION)
        async def precision(request: Request) -> dict[str, Any]:
            return await _call(request.app.state.dymoe_engine, "dymoe_precision", {}, timeout=patience())

        @app.post(PRECISION)
        async def change_precision(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
            return await _change(request.app.state.dymoe_engine, "dymoe_precision", changes)

        @app.post(BUDGET)
        async def change_budget(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
            unknown = sorted(changes.keys() - {"expert_budget", "host_memory"})
            if unknown or not changes:
                raise HTTPException(
                    400,
                    f"vllm-dymoe: {', '.join(unknown) or 'an empty object'} is not a budget; set expert_budget, "
                    "host_memory, or both.",
                )
            return await _change(request.app.state.dymoe_engine, "dymoe_resize", changes)

        @app.post(PREDICTOR)
        async def write_predictor(request: Request) -> dict[str, Any]:
            return await _call(request.app.state.dymoe_engine, "dymoe_predictor", {})

        @app.get(LIVE)
        async def live(request: Request) -> dict[str, Any]:
            return await request.app.state.dymoe_live.answer()

        app.mount(PAGE, StaticFiles(directory=_PAGE_FILES, html=True), name="dymoe-live-page")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.dymoe_engine, state.dymoe_live = engine_client, LiveAnswers(engine_client)


class LiveAnswers:
    """Answers to live pages.

    However many pages are open, the workers are asked once a second.
    """

    def __init__(self, engine: Any, interval: float = _INTERVAL_S) -> None:
        self._engine, self._interval = engine, interval
        self._asking = asyncio.Lock()
        self._answer: dict[str, Any] = {}
        self._asked = float("-inf")

    async def answer(self) -> dict[str, Any]:
        """Return the newest answer of all ranks, up to one interval old."""
        async with self._asking:
            if time.monotonic() - self._asked >= self._interval:
                self._answer = await _call(self._engine, "dymoe_live", {}, timeout=patience())
                self._asked = time.monotonic()
            return self._answer


async def _change(engine: Any, method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Change values on all ranks, after each of them has checked that it can."""
    checked = await _call(engine, "dymoe_check", {"method": method, "changes": changes})
    try:
        return await _call(engine, method, changes)
    except HTTPException as error:  # for instance, memory has become short meanwhile
        if len(checked["ranks"]) > 1:
            error.detail += " Other ranks may have changed; send the old values, or these once more."
        raise


async def _call(
    engine: Any, method: str, arguments: dict[str, Any], *, timeout: float | None = None
) -> dict[str, Any]:  # fmt: skip
    """Call a method of all workers; HTTPException 400 if it raises one of our errors.

    Changes have no timeout, because the next call would take a late answer for its own.
    """
    try:
        return {"ranks": await call_ranks(engine, method, arguments, timeout=timeout)}
    except Exception as error:
        _, ours, sentence = str(error).partition("vllm-dymoe: ")
        if not ours:
            raise
        # The text that vLLM's executor adds is of no use to the client.
        raise HTTPException(400, ours + sentence.partition("', please check the stack trace")[0]) from error
