"""What becomes of the requests of a failed step: the scheduler ends them, the front end raises the sentence.

The sentence travels as the ``stop_reason`` of a request whose finish reason is
"error". ``LLM.generate`` returns both; a server answers with HTTP 500 and the
sentence.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dymoe.vllm_adapter.log import logger
from vllm_dymoe.vllm_adapter.step_failures import FailedStep


def end_failed_requests(scheduler: Any, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
    """End the requests of a failed step, before the scheduler looks at the step's output.

    Args:
        scheduler: a vllm.v1.core.sched.scheduler.Scheduler.
        step: what was scheduled.
        output: what came back.

    Returns:
        The requests that were ended; none if the step did not fail.
    """
    if not isinstance(output, FailedStep):
        return []
    ids = set(step.num_scheduled_tokens) | _readers_of(scheduler, _blocks_written(scheduler, step))
    failed: list[Request] = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    _empty_prefix_cache(scheduler)
    logger.error("%s The %d requests of this step end with this error.", output.failure, len(failed))
    return failed


def add_failures(outputs: dict[int, EngineCoreOutputs], failed: list[Request], output: ModelRunnerOutput) -> None:
    """Tell the clients of ended requests.

    Args:
        outputs: by client, as the scheduler made them.
        failed: what ``end_failed_requests`` returned.
        output: of the failed step.
    """
    for request in failed:
        client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        client.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=output.failure if isinstance(output, FailedStep) else None,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )


def raise_failure(output: Any) -> None:
    """Raise the sentence if a request's output carries one.

    Args:
        output: a vllm.RequestOutput.

    Raises:
        GenerationError: a step of this request failed; vLLM's servers answer with its message and HTTP 500.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error" and isinstance(completion.stop_reason, str):
            raise _generation_error()(completion.stop_reason)


def _generation_error() -> type[Exception]:
    try:
        from vllm.exceptions import GenerationError
    except ImportError:  # vLLM before 0.32
        from vllm.entrypoints.openai.engine.protocol import GenerationError
    return GenerationError


def _blocks_written(scheduler: Any, step: SchedulerOutput) -> set[int]:
    """Blocks of the KV cache that the step wrote to, and those behind them."""
    cached = step.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    written: set[int] = set()
    for request, before in computed.items():
        if request in scheduler.requests:
            groups = scheduler.kv_cache_config.kv_cache_groups
            for group, blocks in zip(groups, scheduler.kv_cache_manager.get_block_ids(request), strict=True):
                written.update(blocks[before // group.kv_cache_spec.block_size :])
    return written - {0}  # block 0 stands for "no block"


def _readers_of(scheduler: Any, blocks: set[int]) -> set[str]:
    """Running requests that use one of ``blocks``.

    With asynchronous scheduling a later step may have been scheduled already, and a
    request in it may have found the failed step's blocks in the prefix cache.
    """
    return {
        request.request_id
        for request in scheduler.running
        if any(not blocks.isdisjoint(group) for group in scheduler.kv_cache_manager.get_block_ids(request.request_id))
    }


def _empty_prefix_cache(scheduler: Any) -> None:
    """Forget every cached prefix.

    vLLM enters a block when it is scheduled, before it is computed. Which of them
    the failed step should have filled is not known for requests that were aborted
    or preempted meanwhile, so none is kept.
    """
    manager = scheduler.kv_cache_manager
    if manager.enable_caching:
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))
