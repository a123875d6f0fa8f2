"""The register of everything in vLLM that we change, with the reason and the day it can go.

A test holds the register against the installed vLLM, so a renamed target is
found by CI and not by a user.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    Attributes:
        target: module and attribute that is replaced.
        why: what vLLM has no other way for.
        wrapper: makes the replacement from the original.
        removable: what upstream would have to offer.
        in_worker: for processes that hold weights only; importing the target everywhere would cost every start seconds.
    """

    target: tuple[str, str]
    why: str
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
    removable: str
    in_worker: bool = False


def _with_prepared_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_dymoe.vllm_adapter.prepare import prepare, refuse_idle_options

        config = original(self, *args, **kwargs)
        if config.model_config is not None and config.model_config.quantization == "dymoe":
            prepare(config)
        else:
            refuse_idle_options(config)
        return config

    return create_engine_config


def _with_a_beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        model = _rank_model(self.worker)
        trace = None if model is None else model.trace
        if trace is not None:
            trace.begin_step(scheduler_output)
        if model is None or scheduler_output.total_num_scheduled_tokens == 0:
            return original(self, scheduler_output)
        step, failures = model.step, model.failures
        step.begin(scheduler_output)
        output = original(self, scheduler_output)
        if trace is not None:
            failed = failures.sentence is not None
            trace.end_step(self.worker.model_runner, scheduler_output, step.number, failed=failed)
        return output if output is None else failures.finish(output)  # without an output, sample_tokens comes next

    return execute_model


def _with_an_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        model = _rank_model(self)
        return output if model is None or model.step.warming_up else model.failures.finish(output)

    return sample_tokens


def _with_transfers_paused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = _rank_model(self)
        if model is None or model.runtime is None:
            return original(self, *args, **kwargs)
        with model.runtime.engine.paused():
            return original(self, *args, **kwargs)

    return warm_up


def _rank_model(worker: Any) -> Any:
    """The worker's RankModel; None if its model is not ours."""
    from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig

    config = worker.vllm_config.quant_config
    return config.model if isinstance(config, DymoeConfig) else None


def _without_failed_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        from vllm_dymoe.vllm_adapter.failed_requests import add_failures, end_failed_requests

        failed = end_failed_requests(self, scheduler_output, model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output)
        add_failures(outputs, failed, model_runner_output)
        return outputs

    return update_from_output


def _with_failures_raised(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_dymoe.vllm_adapter.failed_requests import raise_failure

        outputs = original(self, *args, **kwargs)
        try:
            async for output in outputs:
                raise_failure(output)
                yield output
        finally:
            await outputs.aclose()

    return generate


def _without_reloading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_dymoe.config import ConfigError
        from vllm_dymoe.vllm_adapter.features import RELOADING

        if self.vllm_config.model_config.quantization == "dymoe":
            raise ConfigError(RELOADING)
        return original(self, *args, **kwargs)

    return reload_weights


def _with_our_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def do_log_stats(self: Any) -> None:
        from vllm_dymoe.vllm_adapter.metrics import publish, serving_goes_on, statistics_of

        await original(self)
        with serving_goes_on():
            if (statistics := statistics_of(self)) is not None:
                publish(statistics, await self.collective_rpc("dymoe_stats"))

    return do_log_stats


def _with_our_metrics_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def do_log_stats(self: Any) -> None:
        from vllm_dymoe.vllm_adapter.metrics import publish, serving_goes_on, statistics_of

        original(self)
        with serving_goes_on():
            if (statistics := statistics_of(self)) is not None:
                publish(statistics, self.collective_rpc("dymoe_stats"))

    return do_log_stats


def _with_prompts_seen(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, act_dtype: Any) -> None:
        from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig

        original(self, act_dtype)
        ours = isinstance(self.quant_config, DymoeConfig) and self.quant_config.model is not None
        tap = self.quant_config.model.prompts if ours else None
        attend = self.impl.forward
        if tap is None or getattr(attend, "dymoe_patched", False):
            return

        def forward(layer: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            tap.attend(layer, query, key)
            return attend(layer, query, key, *args, **kwargs)

        forward.dymoe_patched = True  # type: ignore[attr-defined]
        self.impl.forward = forward

    return process_weights_after_loading


def _with_output_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _select_forward(self: Any) -> Callable[..., Any]:
        from vllm_dymoe.vllm_adapter.forward_entry import entry_with_buffers

        entry = entry_with_buffers(self)
        return original(self) if entry is None else entry

    return _select_forward


PATCHES = (
    Patch(
        target=("vllm.engine.arg_utils.EngineArgs", "create_engine_config"),
        why=(
            "Options must be refused in the user's process before any weight is loaded, decisions taken on the host "
            "must not be captured in a CUDA graph, and the worker methods must be there without another flag."
        ),
        wrapper=_with_prepared_config,
        removable="a hook of QuantizationConfig that sees the finished VllmConfig",
    ),
    Patch(
        target=("vllm.v1.worker.worker_base.WorkerWrapperBase", "execute_model"),
        why=(
            "An expert that cannot be fetched must fail its step alone, so it has to be known where a step begins; and "
            "whether it is a prefill, how many of its rows are tokens, and whose, is known here, of every attention "
            "backend. Only executors come this way: vLLM's warm-up calls Worker.execute_model itself."
        ),
        wrapper=_with_a_beginning,
        removable="an exception of a model that fails a step and not the engine",
    ),
    Patch(
        target=("vllm.v1.worker.gpu_worker.Worker", "sample_tokens"),
        why="Here a step ends, and its failure has to leave the worker with its output.",
        wrapper=_with_an_end,
        removable="an exception of a model that fails a step and not the engine",
    ),
    Patch(
        target=("vllm.v1.worker.gpu_worker.Worker", "determine_available_memory"),
        why=(
            "CUDA graphs are captured in here, once to learn how much memory they take, and a call of CUDA on another "
            "thread would make a capture invalid: nothing is fetched in the background from the first warm-up run on."
        ),
        wrapper=_with_transfers_paused,
        removable="a hook around the capture of graphs",
    ),
    Patch(
        target=("vllm.v1.worker.gpu_worker.Worker", "compile_or_warm_up_model"),
        why="As above, where the graphs are captured that serve.",
        wrapper=_with_transfers_paused,
        removable="a hook around the capture of graphs",
    ),
    Patch(
        target=("vllm.v1.core.sched.scheduler.Scheduler", "update_from_output"),
        why="The requests of a failed step have to end, and nothing it wrote may stay in the prefix cache.",
        wrapper=_without_failed_requests,
        removable="an exception of a model that fails a step and not the engine",
    ),
    Patch(
        target=("vllm.v1.engine.async_llm.AsyncLLM", "generate"),
        why='vLLM\'s servers answer "Internal server error" to a failed request, and its sentence would be lost.',
        wrapper=_with_failures_raised,
        removable="an error message in EngineCoreOutput that servers pass on (vLLM 0.33 has the field)",
    ),
    Patch(
        target=("vllm.v1.worker.gpu_worker.Worker", "reload_weights"),
        why=(
            "Reloading would exchange the dense layers and leave the packed experts as they are, and vLLM asks nobody "
            "before it begins."
        ),
        wrapper=_without_reloading,
        removable="a way for a quantization method to refuse or to take part in reloading",
        in_worker=True,
    ),
    Patch(
        target=("vllm.model_executor.layers.attention.Attention", "process_weights_after_loading"),
        why=(
            'The system "dymoe" has to see the queries and keys of a prompt, which only the implementation of an '
            "attention layer gets outside of compiled graphs; with other systems nothing is put in its way."
        ),
        wrapper=_with_prompts_seen,
        removable="a hook of the attention layer that is called with queries and keys, outside of compiled graphs",
        in_worker=True,
    ),
    Patch(
        target=("vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner", "_select_forward"),
        why=(
            "vLLM's operator of a MoE layer returns fresh tensors, and a CUDA graph behind it would read those of its "
            "capture; ours writes into buffers (vLLM issue 37363)."
        ),
        wrapper=_with_output_buffers,
        removable="an operator of MoE layers with output arguments, or experts that are chosen inside of the graph",
        in_worker=True,
    ),
    Patch(
        target=("vllm.v1.engine.async_llm.AsyncLLM", "do_log_stats"),
        why="The counts of the workers have to reach the server's /metrics and log when vLLM's own do.",
        wrapper=_with_our_metrics,
        removable="a field of SchedulerStats for data of a worker's plugin, passed on to stat logger plugins",
    ),
    Patch(
        target=("vllm.v1.engine.llm_engine.LLMEngine", "do_log_stats"),
        why="As above, for an LLM() whose statistics are on.",
        wrapper=_with_our_metrics_at_once,
        removable="a field of SchedulerStats for data of a worker's plugin, passed on to stat logger plugins",
    ),
)


def apply_patches(*, in_worker: bool = False) -> None:
    """Apply the patches for this kind of process, each once."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for patch in PATCHES:
        if patch.in_worker and not in_worker:
            continue
        owner = resolve_obj_by_qualname(patch.target[0])
        original = getattr(owner, patch.target[1])
        if not getattr(original, "dymoe_patched", False):
            patched: Any = patch.wrapper(original)
            patched.dymoe_patched = True
            setattr(owner, patch.target[1], patched)
