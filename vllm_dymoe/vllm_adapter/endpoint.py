"""HTTP routes for what may change while a server runs, where vLLM has endpoint plugins.

vLLM loads such routes only if ``VLLM_PLUGINS`` names them: ``VLLM_PLUGINS=dymoe vllm serve ...``. Their paths begin
with ``/v1``, which is what ``--api-key`` guards.
"""

from typing import Any

from fastapi import FastAPI, HTTPException, Request

ROUTES = {"/v1/dymoe/precision": "dymoe_precision", "/v1/dymoe/predictor": "dymoe_predictor"}
"""The worker method behind each path."""

_BEHIND = "', please check the stack trace"
"""What vLLM's executor says behind a worker's sentence; the sentence has all that the client needs."""


class PrecisionEndpoint:
    """``GET`` asks what is in force, ``POST`` with an object of changes makes them; see the worker methods."""

    name = "dymoe"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        for path, method in ROUTES.items():
            _add(app, path, method)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine."""
        state.dymoe_engine = engine_client


def _add(app: FastAPI, path: str, method: str) -> None:
    @app.get(path)
    async def ask(request: Request) -> dict[str, Any]:
        return await _call(request.app.state, method, {})

    @app.post(path)
    async def change(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
        return await _call(request.app.state, method, changes)


async def _call(state: Any, method: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The answers of all ranks; a sentence of ours is the client's mistake."""
    try:
        return {"ranks": await state.dymoe_engine.collective_rpc(method, kwargs=changes)}
    except Exception as error:
        _, ours, sentence = str(error).partition("vllm-dymoe: ")
        if not ours:
            raise
        raise HTTPException(400, ours + sentence.partition(_BEHIND)[0]) from error
