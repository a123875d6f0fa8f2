"""What becomes of a step in which an expert could not be fetched: in its worker, in the scheduler, at the front end.

An exception in a model's forward would end the engine, and other ranks would wait in their next all-reduce for ever. So
the layer that failed returns zeros and notes a sentence here, the layers behind it do no work, and the sentence leaves
the worker with the step's output. The scheduler ends the requests of that step, with the sentence as ``stop_reason``.

The output of one rank only is collected. Another rank leaves its sentence at the process group's key-value store
*before* it takes part in the step's next collective, so it is there when the output rank has the step's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.step import RunningStep


@dataclass
class FailedStep(ModelRunnerOutput):
    """The output of a step that must not be used; ``failure`` is one sentence for the clients of its requests."""

    failure: str = ""

    @classmethod
    def of(cls, output: ModelRunnerOutput, failure: str) -> "FailedStep":
        """The same output, declared failed; ``output`` may be shared by many steps and stays as it is."""
        return cls(**{field.name: getattr(output, field.name) for field in fields(output)}, failure=failure)


class StepFailures:
    """The failure of the running step, if any: the first ``sentence`` wins."""

    def __init__(
        self,
        step: RunningStep,
        store: Any = None,  # a torch.distributed.Store that all ranks share; None for a single rank
        *,
        collects: bool = True,  # this rank's output is the one that vLLM collects
        shared: bool = False,  # other engines compute the same steps with these experts, and have to find the sentence
        engine: int = 0,  # whose steps these are, where they are not shared
        late: bool = False,  # whether a step that has run on the host may still fail on the device
        on_failure: Callable[[int], None] = lambda step: None,
        # Called with the number of a step that failed on any rank, when its output is complete.
    ) -> None:
        self.sentence: str | None = None
        self._late, self._on_failure, self._failed_through = late, on_failure, (0, "")
        self._step, self._store, self._collects, self._shared, self._engine = step, store, collects, shared, engine

    @property
    def alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return self._store is None

    def record(self, sentence: str) -> None:
        if self.sentence is None:
            self.sentence = sentence
            if self._store is not None:
                self._store.set(self._key(self._step.number), sentence)
                self._store.check([self._key(self._step.number)])  # writing alone does not wait for the server

    def record_late(self, sentence: str) -> None:
        """A step of the device fails while it runs: every step that has begun and whose output is not complete does."""
        self._failed_through = self._step.number, f"vllm-dymoe: {sentence}"
        for step in range(max(1, self._step.number - 1), self._step.number + 1):  # vLLM schedules one step ahead
            if self._store is not None:
                self._store.set(self._key(step), f"vllm-dymoe: {sentence}")

    def finish(self, output: Any) -> Any:
        """The step ends: declare its output failed if the step is; this rank may have none."""
        step, mine = self._step.number, self.sentence
        self.sentence = None
        self._step.end()
        if output is None or not self._collects or (mine is None and self._store is None and not self._late):
            return output

        def checked(complete: ModelRunnerOutput) -> ModelRunnerOutput:
            through, sentence = self._failed_through
            failure = mine or self._taken(step) or (sentence if step <= through else "")
            if failure:
                self._on_failure(step)
            return FailedStep.of(complete, failure) if failure else complete

        # An output that is still being computed says nothing yet about the other ranks.
        return _Checked(output, checked) if isinstance(output, AsyncModelRunnerOutput) else checked(output)

    def _taken(self, step: int) -> str | None:
        key = self._key(step)
        if self._store is None or not self._store.check([key]):
            return None
        sentence: str = self._store.get(key).decode()
        if not self._shared:
            self._store.delete_key(key)
        return sentence

    def _key(self, step: int) -> str:
        return f"vllm_dymoe/failed_step/{self._engine}/{step}"


class _Checked(AsyncModelRunnerOutput):
    """An asynchronous output that is checked when it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, check: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        self._output = output
        self._check = check

    def get_output(self) -> ModelRunnerOutput:
        return self._check(self._output.get_output())

    def get_kv_connector_output(self) -> Any:
        """What vLLM asks for from 0.33 on."""
        return self._output.get_kv_connector_output()


def make_step_failures(
    step: RunningStep, *, shared: bool, late: bool, on_failure: Callable[[int], None]
) -> StepFailures:
    """For this worker, after vLLM has set up its process groups; arguments as above."""
    from torch.distributed import distributed_c10d
    from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group, get_world_group

    engines = get_dp_group()
    if not shared and get_world_group().world_size == engines.world_size:  # an engine is one rank
        return StepFailures(step, late=late, on_failure=on_failure)
    collects = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
    engine = 0 if shared else engines.rank_in_group
    store = distributed_c10d._get_default_store()
    return StepFailures(step, store, collects=collects, shared=shared, engine=engine, late=late, on_failure=on_failure)


def update_from_output(
    update: Callable[..., dict[int, EngineCoreOutputs]], scheduler: Any, step: SchedulerOutput, output: Any
) -> dict[int, EngineCoreOutputs]:
    """The requests of a failed step have to end, and nothing that it wrote may stay in the prefix cache.

    vLLM enters a block there when it is scheduled, before it is computed. Which of them the failed step should have
    filled is not known for requests that were aborted or preempted meanwhile, so none is kept.
    """
    if not isinstance(output, FailedStep):
        return update(scheduler, step, output)
    ids = set(step.num_scheduled_tokens) | _readers_of(scheduler, _blocks_written(scheduler, step))
    failed: list[Request] = scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
    manager = scheduler.kv_cache_manager
    if manager.enable_caching:
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))
    logger.error("%s The %d requests of this step end with this error.", output.failure, len(failed))
    outputs = update(scheduler, step, output)
    for request in failed:
        client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        ended = EngineCoreOutput(
            request.request_id, [], finish_reason=request.get_finished_reason(), stop_reason=output.failure,
            events=request.take_events(), trace_headers=request.trace_headers,
        )  # fmt: skip
        client.outputs.append(ended)
    return outputs


def raise_failure(output: Any) -> None:
    """Raise the sentence of a vllm.RequestOutput as GenerationError, which vLLM's servers answer with HTTP 500."""
    for completion in output.outputs:
        if completion.finish_reason == "error" and isinstance(completion.stop_reason, str):
            try:
                from vllm.exceptions import GenerationError
            except ImportError:  # vLLM before 0.32
                from vllm.entrypoints.openai.engine.protocol import GenerationError
            raise GenerationError(completion.stop_reason)


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
    """Running requests that use one of ``blocks``: one that was scheduled since may have found them in the cache."""
    return {
        request.request_id
        for request in scheduler.running
        if any(not blocks.isdisjoint(group) for group in scheduler.kv_cache_manager.get_block_ids(request.request_id))
    }
