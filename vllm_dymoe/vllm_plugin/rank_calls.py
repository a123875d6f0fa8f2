"""Calls of a worker's method on all ranks."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from vllm import envs


def patience() -> float:
    """Return the timeout of questions in seconds, which is vLLM's for steps.

    A dead node never answers, and requests wait, too.
    """
    return float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)


async def call_ranks(engine: Any, method: str, arguments: Mapping[str, Any], *, timeout: float | None) -> list[Any]:
    """Return the answers of all ranks to a call, engine by engine.

    vLLM's ``collective_rpc`` calls all data-parallel engines of a server, but returns the answers of the first one.

    Args:
        engine: an AsyncLLM.
        timeout: seconds; None for no limit.
    """
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        answers: list[Any] = await engine.collective_rpc(method, timeout=timeout, kwargs=arguments)
        return answers
    client, call = engine.engine_core, ("collective_rpc", method, timeout, (), arguments)
    engines = await asyncio.gather(*(client._call_utility_async(*call, engine=core) for core in client.core_engines))
    return [answer for answers in engines for answer in answers]


class _Replies:
    """A rank's queue of replies, and whether the reply of one call was read."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.read = queue, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        reply = self._queue.dequeue(*args, **kwargs)
        self.read = True
        return reply


def collective_rpc(
    original: Callable[..., Any], self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None, **how: Any,
) -> Any:  # fmt: skip
    """Take every rank's reply out of its queue, also if a rank has raised an error.

    vLLM stops at the first error. The other ranks' replies would stay in their queues, where the next call or step
    would take them for its own.
    """
    call = self, method, timeout, args, kwargs
    if how.get("non_block") or how.get("unique_reply_rank") is not None:  # a step, whose error ends the engine
        return original(*call, **how)
    queues = self.response_mqs
    self.response_mqs = watched = [_Replies(queue) for queue in queues]
    try:
        return original(*call, **how)
    except RuntimeError:
        if any(replies.read for replies in watched):  # otherwise the call has reached no rank
            for replies in watched:
                if not replies.read:
                    replies.dequeue(timeout=timeout)
        raise
    finally:
        if self.response_mqs is watched:  # a shutdown in another thread drops them
            self.response_mqs = queues
