"""Handles a step in which an expert could not be fetched.

The worker, the scheduler and the front end each handle a part of it.

An exception in a model's forward would end the engine, and other ranks would wait for ever in their next all-reduce.
So the layer that failed returns zeros and records an error message here, later layers do no work, and the message
leaves the worker with the step's output. The scheduler ends the requests of that step, with the message as
``stop_reason``.

vLLM collects only one rank's output. Another rank leaves its message in the process group's key-value store *before*
it takes part in the step's next collective, so it is there when the output rank has the step's tokens.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.step import RunningStep


@dataclass
class FailedStep(ModelRunnerOutput):
    """The output of a step that must not be used.

    Attributes:
        failure: the error message for the clients of the step's requests.
    """

    failure: str = ""

    @classmethod
    def of(cls, output: ModelRunnerOutput, failure: str) -> "FailedStep":
        """Return a copy of an output, marked as failed.

        ``output`` itself is not changed, since many steps may share it.
        """
        return cls(**{field.name: getattr(output, field.name) for field in fields(output)}, failure=failure)


class StepFailures:
    """The failure of the running step, if any; the first message wins."""

    def __init__(
        self,
        step: RunningStep,
        store: Any = None,  # a torch.distributed.Store that all ranks share; None for a single rank
        *,
        collects: bool = True,  # vLLM collects this rank's output
        shared: bool = False,  # other engines compute the same steps with these experts, and must find the message
        engine: int = 0,  # the engine of these steps, if they are not shared
        late: bool = False,  # a step that has run on the host may still fail on the device
        on_failure: Callable[[int], None] = lambda step: None,
        # Called with the number of a step that failed on any rank, when its output is complete.
        on_device: Callable[[int], str] = lambda step: "",
        # Called with the number of a step; returns why it failed on the device, or "".
    ) -> None:
        self.sentence: str | None = None
        self._late, self._on_failure, self._failed_through = late, on_failure, (0, "")
        self._on_device, self._seen = on_device, 0  # number of failures, of any rank, that this one has seen
        self._step, self._store, self._collects, self._shared, self._engine = step, store, collects, shared, engine

    @property
    def alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return self._store is None

    def record(self, sentence: str) -> None:
        if self.sentence is None:
            self.sentence = sentence
            if self._store is not None:
                self._store.add(self._count_key, 1)
                self._store.set(self._key(self._step.number), sentence)
                self._store.check([self._key(self._step.number)])  # a write alone does not wait for the server

    def any_new(self) -> bool:
        """Return whether a step has failed on any rank since the last call.

        Asks the store; call it between two steps.
        """
        if self._store is None:
            return False
        before, self._seen = self._seen, int(self._store.add(self._count_key, 0))
        return self._seen != before

    def record_late(self, sentence: str) -> None:
        """Record the failure of a device-planned step while it runs.

        All steps with incomplete output fail.
        """
        self._failed_through = self._step.number, f"vllm-dymoe: {sentence}"
        for step in range(max(1, self._step.number - 1), self._step.number + 1):  # vLLM schedules one step ahead
            if self._store is not None:
                self._store.set(self._key(step), f"vllm-dymoe: {sentence}")

    def finish(self, output: Any) -> Any:
        """End the step and mark its output if it failed; this rank may have no output."""
        step, mine = self._step.number, self.sentence
        self.sentence = None
        self._step.end()
        if not self._collects and (why := self._on_device(step - 1)):
            self.record_late(why)  # nobody waits for this rank's output, so the failure was not known before
        if output is None or not self._collects or (mine is None and self._store is None and not self._late):
            return output

        def checked(complete: ModelRunnerOutput) -> ModelRunnerOutput:
            through, sentence = self._failed_through
            late = f"vllm-dymoe: {why}" if (why := self._on_device(step)) else ""
            failure = mine or self._taken(step) or late or (sentence if step <= through else "")
            if failure:
                self._on_failure(step)
            return FailedStep.of(complete, failure) if failure else complete

        # While an output is being computed, failures of other ranks are not known yet.
        return _Checked(output, checked) if isinstance(output, AsyncModelRunnerOutput) else checked(output)

    def _taken(self, step: int) -> str | None:
        key = self._key(step)
        if self._store is None or not self._store.check([key]):
            return None
        sentence: str = self._store.get(key).decode()
        if not self._shared:
            self._store.delete_key(key)
        return sentence

    @property
    def _count_key(self) -> str:
        return f"vllm_dymoe/failed_steps/{self._engine}"

    def _key(self, step: int) -> str:
        return f"vllm_dymoe/failed_step/{self._engine}/{step}"


class _Checked(AsyncModelRunnerOutput):
    """An asynchronous output that is checked when it arrives."""

    def __init__(self, output: AsyncModelRunnerOutput, check: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        self._output = output
        self._check = check

    def get_output(self) -> ModelRunnerOutput:
        return self._check(self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """Return what vLLM 0.33 and later ask for."""
        return self._output.get_kv_connector_output()


def make_step_failures(
    step: RunningStep, *, shared: bool, late: bool, on_failure: Callable[[int], None], on_device: Callable[[int], str]
) -> StepFailures:
    """Return the object for this worker, once vLLM has set up its process groups.

    Arguments are as for the class.
    """
    from torch.distributed import distributed_c10d
    from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group, get_world_group

    engines = get_dp_group()
    if not shared and get_world_group().world_size == engines.world_size:  # an engine is one rank
        return StepFailures(step, late=late, on_failure=on_failure, on_device=on_device)
    collects = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
    engine = 0 if shared else engines.rank_in_group
    store = distributed_c10d._get_default_store()
    return StepFailures(
        step, store, collects=collects, shared=shared, engine=engine, late=late, on_failure=on_failure,
        on_device=on_device,
    )  # fmt: skip


def update_from_output(
    update: Callable[..., dict[int, EngineCoreOutputs]], scheduler: Any, step: SchedulerOutput, output: Any
) -> dict[int, EngineCoreOutputs]:
    """End the requests of a failed step, and clear all caches of what it computed.

    vLLM enters a block into the cache when it is scheduled, before it is computed. For requests that were aborted or
    preempted meanwhile it is unknown which blocks the failed step should have filled, so all of them are removed.
    """
    if not isinstance(output, FailedStep):
        return update(scheduler, step, output)
    ids = set(step.num_scheduled_tokens) | _readers_of(scheduler, step)
    failed: list[Request] = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    manager = scheduler.kv_cache_manager
    if manager.enable_caching:
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))
    _clear(scheduler.connector)
    logger.error("%s The %d requests of this step end with this error.", output.failure, len(failed))
    outputs = update(scheduler, step, output)
    for request in failed:
        client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        # vLLM's front end takes an output without pooled data for a completion's, and would end.
        pooled = None if request.pooling_params is None else torch.empty(0)
        ended = EngineCoreOutput(
            request.request_id, [], finish_reason=request.get_finished_reason(), stop_reason=output.failure,
            pooling_output=pooled, events=request.take_events(), trace_headers=request.trace_headers,
        )  # fmt: skip
        client.outputs.append(ended)
    return outputs


def raise_failure(output: Any) -> None:
    """Raise GenerationError if a vllm.RequestOutput has failed.

    vLLM's servers answer this error with HTTP 500.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error" and isinstance(completion.stop_reason, str):
            _raise(completion.stop_reason)


def keep_failure(output: Any, failure: str) -> None:
    """Keep the error message of a failed vllm.PoolingRequestOutput, for ``raise_pooling_failure``."""
    output.dymoe_failure = failure


def raise_pooling_failure(output: Any) -> None:
    """Raise GenerationError if a vllm.PoolingRequestOutput has failed."""
    if failure := getattr(output, "dymoe_failure", None):
        _raise(failure)


async def checked(outputs: AsyncGenerator[Any, None], check: Callable[[Any], None]) -> AsyncIterator[Any]:
    """Yield outputs after checking each; an error of the check closes their generator."""
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            check(output)
            yield output


def _raise(failure: str) -> NoReturn:
    try:
        from vllm.exceptions import GenerationError
    except ImportError:  # vLLM before 0.32
        from vllm.entrypoints.openai.engine.protocol import GenerationError
    raise GenerationError(failure)


def _clear(connector: Any) -> None:
    """Clear what a KV connector, if there is one, stores outside of the device.

    It is storing the failed step's blocks already. Connectors that only send to other engines confirm nothing.
    """
    if connector is not None and not connector.reset_cache():
        logger.error(
            "vllm-dymoe: the KV connector %s did not confirm that it has dropped what the failed step computed. If it "
            "stores KV caches, clear its storage: later requests with the same beginning may get wrong answers.",
            type(connector).__name__,
        )


def _blocks_written(scheduler: Any, step: SchedulerOutput) -> set[int]:
    """Return the KV cache blocks that a step wrote to, and later ones of its requests."""
    cached = step.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    written: set[int] = set()
    for request, before in computed.items():
        if request in scheduler.requests:
            groups = scheduler.kv_cache_config.kv_cache_groups
            for group, blocks in zip(groups, scheduler.kv_cache_manager.get_block_ids(request), strict=True):
                written.update(blocks[before // group.kv_cache_spec.block_size :])
    return written - {0}  # block 0 means "no block"


def _readers_of(scheduler: Any, step: SchedulerOutput) -> set[str]:
    """Return requests that may use KV cache blocks that a step wrote to.

    A request that was scheduled since may have found them in the cache. If a request of the step has ended or was
    preempted meanwhile, it is unknown which blocks it had: then all requests that have blocks are returned.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return set()
    used = {name: set().union(*manager.get_block_ids(name)) for name in scheduler.requests}
    written = _blocks_written(scheduler, step)
    known = all(used.get(name) for name in step.num_scheduled_tokens)
    return {name for name, blocks in used.items() if (blocks & written if known else blocks)}
