"""An HTTP route for what decides precision, where vLLM has endpoint plugins.

vLLM loads such routes only if ``VLLM_PLUGINS`` names them: ``VLLM_PLUGINS=dymoe vllm serve ...``. The path begins with
``/v1``, which is what ``--api-key`` guards.
"""

from typing import Any

from fastapi import FastAPI, HTTPException, Request

PATH = "/v1/dymoe/precision"


class PrecisionEndpoint:
    """``GET`` asks what is in force, ``POST`` with an object of changes makes them; see ``dymoe_precision``."""

    name = "dymoe"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""

        @app.get(PATH)
        async def ask(request: Request) -> dict[str, Any]:
            return await _call(request.app.state, {})

        @app.post(PATH)
        async def change(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
            return await _call(request.app.state, changes)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine."""
        state.dymoe_engine = engine_client


async def _call(state: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The answers of all ranks; a sentence of ours is the client's mistake."""
    try:
        return {"ranks": await state.dymoe_engine.collective_rpc("dymoe_precision", kwargs=changes)}
    except Exception as error:
        _, ours, sentence = str(error).partition("vllm-dymoe: ")
        if not ours:
            raise
        raise HTTPException(400, ours + sentence) from error
