"""The register of everything in vLLM that we change.

It says for each change why, and when it can go. A test compares the register with the installed vLLM, so CI finds a
renamed target before a user does.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from vllm.config import get_current_vllm_config_or_none

from vllm_dymoe.vllm_plugin import data_parallel, failures, prepare, rank_calls
from vllm_dymoe.vllm_plugin.automatic_budget import leave_room
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig
from vllm_dymoe.vllm_plugin.rank_server import RankServer
from vllm_dymoe.vllm_plugin.sleep import check_reloading

Original = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """One change to vLLM."""

    target: tuple[str, str]  # module or class, and attribute that is replaced
    removable: str  # what upstream would have to offer
    replacement: Original  # called with the original before its arguments; its docstring says why

    @property
    def why(self) -> str:
        return inspect.getdoc(self.replacement) or ""

    def wrapped(self, original: Original) -> Original:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.replacement(original, *args, **kwargs)

        wrapper.dymoe_patched = True  # type: ignore[attr-defined]
        return wrapper


PATCHES: list[Patch] = []
_WORKER, _CPU_WORKER = "vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"
_STEP_ERROR = "a model exception that fails only its step, not the engine"
_POOLING_ERROR = "an error message of a pooling request that passes from the engine to the caller"
_SLEEP_HOOK = "a register of what sleeps and wakes with its weights and KV cache"
_CAPTURE_HOOK = "a hook around the capture of graphs"
_STATS_FIELD = "a field of SchedulerStats for data of a worker's plugin, passed on to stat logger plugins"


def _replaces(owner: str, name: str, removable: str) -> Callable[[Original], Original]:
    def register(replacement: Original) -> Original:
        PATCHES.append(Patch((owner, name), removable, replacement))
        return replacement

    return register


def apply_patches() -> None:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for patch in PATCHES:
        if patch.target[0] == _CPU_WORKER and not current_platform.is_cpu():
            continue  # its module replaces torch.cuda's events and streams by placeholders
        owner = resolve_obj_by_qualname(patch.target[0])
        original = getattr(owner, patch.target[1])
        if not getattr(original, "dymoe_patched", False):
            setattr(owner, patch.target[1], patch.wrapped(original))


@_replaces(
    "vllm.engine.arg_utils.EngineArgs", "create_engine_config",
    "a hook of QuantizationConfig that sees the finished VllmConfig",
)  # fmt: skip
def _create_engine_config(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse options in the user's process, and set CUDA graphs and worker methods.

    Host code must not be captured in a CUDA graph, and the worker methods must exist without another flag. If no option
    of the plugin was set, they are chosen as `vllm-dymoe serve` does. If the user has not set the number of tokens of a
    step, it follows from the rate of the link, and vLLM derives its configuration again.
    """
    # vLLM writes derived values into its own arguments, and refuses some of these when it finds them again.
    given = vars(self) | {"speculative_config": self.speculative_config and dict(self.speculative_config)}
    config = original(self, *args, **kwargs)
    ours = config.model_config is not None and config.model_config.quantization == "dymoe"
    if ours and (chosen := prepare.chosen_options(config)):
        self.additional_config = config.additional_config = given["additional_config"] = chosen
    if ours and given["max_num_batched_tokens"] is None and (tokens := prepare.tokens_of_step(config)):
        vars(self).update(given, max_num_batched_tokens=tokens)
        config = original(self, *args, **kwargs)
    (prepare.prepare if ours else prepare.refuse_idle_options)(config)
    return config


@_replaces(
    "vllm.model_executor.model_loader.base_loader", "initialize_model",
    "a hook of QuantizationConfig that sees the model before its weights",
)  # fmt: skip
def _initialize_model(original: Original, vllm_config: Any, **kwargs: Any) -> Any:
    """Check that a model computes its experts through us, and find its gates.

    The gates are next to the experts. A model that computes experts with its own code would otherwise be served
    without offloading. A weight that two modules share counts as loaded in both.
    """
    from vllm_dymoe.vllm_plugin.moe_method import model_made  # not before vLLM has decided about graphs

    model = original(vllm_config=vllm_config, **kwargs)
    made = kwargs.get("model_config") or vllm_config.model_config
    model_made(vllm_config, model, draft=getattr(made, "runner_type", "") == "draft")
    if vllm_config.model_config.quantization == "dymoe" and isinstance(model, Module):
        prepare.name_every_place(model)
    return model


@_replaces("vllm.v1.worker.worker_base.WorkerWrapperBase", "execute_model", _STEP_ERROR)
def _execute_model(original: Original, self: Any, scheduler_output: Any) -> Any:
    """Begin and end a step, so that an expert that cannot be read fails only it.

    vLLM's warm-up calls Worker.execute_model itself, so its steps do not come here.
    """
    config = self.worker.vllm_config
    rank = _rank(config.quant_config)
    if rank is None or not rank.begin_step(scheduler_output, self.worker.model_runner):
        return original(self, scheduler_output)
    try:
        output = original(self, scheduler_output)
    finally:
        rank.end_native()
    ended = rank.end_model(self.worker.model_runner, scheduler_output, output)
    # sample_tokens comes next if there is no output, but not in the earlier stages of a pooling model's pipeline.
    if output is None and config.model_config.runner_type == "pooling":
        return rank.end_step(None)
    return ended


@_replaces(_WORKER, "sample_tokens", _STEP_ERROR)
def _sample_tokens(original: Original, self: Any, grammar_output: Any) -> Any:
    """End a step; if it failed, its output carries the error to the front end."""
    output, rank = original(self, grammar_output), _rank(self.vllm_config.quant_config)
    return output if rank is None else rank.end_step(output)


@_replaces(_WORKER, "execute_dummy_batch", "a step for ranks without requests, as execute_model has one")
def _execute_dummy_batch(original: Original, self: Any) -> Any:
    """Run a step in which a rank without requests computes other ranks' tokens.

    The ranks are data-parallel. vLLM treats such a step like a warm-up, but its tokens belong to requests.
    """
    rank = _rank(self.vllm_config.quant_config)
    with contextlib.nullcontext() if rank is None else rank.idle_step():
        return original(self)


_CPU = "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
_COLLECTIVE = "this collective in CpuCommunicator"


@_replaces(_CPU, "all_gatherv", _COLLECTIVE)
def _all_gatherv(original: Original, self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
    """Gather rows for expert parallelism over data-parallel ranks.

    vLLM's communicator of CPUs cannot do this.
    """
    return data_parallel.gather_rows(self, input_, sizes)


@_replaces(_CPU, "reduce_scatterv", _COLLECTIVE)
def _reduce_scatterv(original: Original, self: Any, input_: Any, dim: int = 0, sizes: Any = None) -> Any:
    """Scatter the sums, in the other direction of ``all_gatherv``."""
    return data_parallel.add_rows(self, input_, sizes)


@_replaces(
    "vllm.model_executor.layers.fused_moe.config.FusedMoEParallelConfig", "make",
    "data parallelism of layers with experts that cuts none of them",
)  # fmt: skip
def _make_parallel(
    original: Original, tp_size_: int, pcp_size_: int, dp_size_: int, sp_size_: int, vllm_parallel_config: Any
) -> Any:
    """Keep experts whole with data parallelism but without expert parallelism.

    vLLM would cut each expert into parts for all data-parallel ranks, whose tokens then have to be exchanged in every
    layer. An engine's budget holds some whole experts, and its tokens stay where they are.
    """
    config = get_current_vllm_config_or_none()
    ours = config is not None and config.model_config is not None and config.model_config.quantization == "dymoe"
    dp_size_ = 1 if ours and not vllm_parallel_config.enable_expert_parallel else dp_size_
    return original(tp_size_, pcp_size_, dp_size_, sp_size_, vllm_parallel_config)


_replaces("vllm.v1.core.sched.scheduler.Scheduler", "update_from_output", _STEP_ERROR)(failures.update_from_output)


_replaces(
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor", "collective_rpc",
    "an executor that reads every rank's reply before it raises an error",
)(rank_calls.collective_rpc)  # fmt: skip


@_replaces(_WORKER, "determine_available_memory", _CAPTURE_HOOK)
def _determine_available_memory(original: Original, self: Any, *args: Any, **kwargs: Any) -> int:
    """Shrink an automatic budget if a step needs more memory than was estimated.

    vLLM's profile run measures what a step needs. Without this, its KV cache would be smaller by the difference.
    """
    available: int = _warm_up(original, self, *args, **kwargs)
    rank = _rank(self.vllm_config.quant_config)
    return available if rank is None else leave_room(self.vllm_config, rank.server, available)


@_replaces(_WORKER, "compile_or_warm_up_model", _CAPTURE_HOOK)
def _warm_up(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Pause transfers while CUDA graphs are captured.

    A CUDA call of another thread would invalidate the capture.
    """
    rank = _rank(self.vllm_config.quant_config)
    with contextlib.nullcontext() if rank is None else rank.server.engine.paused():
        return original(self, *args, **kwargs)


def _rank(config: Any) -> RankServer | None:
    """Return the rank of a quantization config.

    None if the config is not ours, still loads, or has no MoE layers.
    """
    loading = config.loading if isinstance(config, DymoeConfig) else None
    return None if loading is None else loading.rank_server


@_replaces(
    "vllm.v1.engine.async_llm.AsyncLLM", "generate",
    "an error message in EngineCoreOutput that servers pass on (vLLM 0.33 has the field)",
)  # fmt: skip
def _generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Answer failed requests with their error message.

    vLLM would answer "Internal server error" instead.
    """
    return failures.checked(original(self, *args, **kwargs), failures.raise_failure)


@_replaces("vllm.v1.engine.async_llm.AsyncLLM", "encode", _POOLING_ERROR)
def _encode(original: Original, self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Answer failed requests of a pooling model with their error message."""
    return failures.checked(original(self, *args, **kwargs), failures.raise_pooling_failure)


@_replaces("vllm.v1.engine.llm_engine.LLMEngine", "step", _POOLING_ERROR)
def _step(original: Original, self: Any) -> list[Any]:
    """Raise the error of a failed request of a pooling model.

    What LLM.embed() and its like return has no place for it, so a failed request would look like an answer.
    """
    outputs: list[Any] = original(self)
    for output in outputs:
        failures.raise_pooling_failure(output)
    return outputs


@_replaces("vllm.v1.engine.output_processor.RequestState", "make_request_output", _POOLING_ERROR)
def _make_request_output(
    original: Original, self: Any, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Keep the error message of a failed request of a pooling model.

    vLLM keeps stop reasons of completions only.
    """
    output = original(self, new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
    if pooling_output is not None and isinstance(stop_reason, str):
        failures.keep_failure(output, stop_reason)
    return output


@_replaces(_WORKER, "reload_weights", "a way for a quantization method to refuse or to take part in reloading")
def _reload_weights(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to reload weights.

    Reloading would replace the dense layers and leave the packed experts, without warning.
    """
    config = self.vllm_config
    check_reloading(config, _rank(getattr(config, "quant_config", None)), other=bool(args or kwargs))
    return original(self, *args, **kwargs)


@_replaces(_CPU_WORKER, "sleep", _SLEEP_HOOK)
@_replaces(_WORKER, "sleep", _SLEEP_HOOK)
def _sleep(original: Original, self: Any, level: int = 1) -> None:
    """Free the slots when the engine sleeps; they are not among vLLM's weights."""
    if (rank := _rank(self.vllm_config.quant_config)) is not None:
        rank.server.sleep(level)
    original(self, level)


@_replaces(_CPU_WORKER, "wake_up", _SLEEP_HOOK)
@_replaces(_WORKER, "wake_up", _SLEEP_HOOK)
def _wake_up(original: Original, self: Any, tags: list[str] | None = None) -> None:
    """Allocate the slots again, after vLLM's memory.

    vLLM's memory has the first claim on the device.
    """
    original(self, tags)
    rank = _rank(self.vllm_config.quant_config)
    if rank is not None and (tags is None or "weights" in tags):
        rank.server.wake()


@_replaces(_WORKER, "shutdown", "a hook of QuantizationConfig at the end of its worker")
def _shutdown(original: Original, self: Any) -> None:
    """Free transfer threads, slots and files when an engine ends.

    Its process may continue, for instance with another engine.
    """
    try:
        original(self)
    finally:
        config = getattr(getattr(self, "vllm_config", None), "quant_config", None)
        if isinstance(config, DymoeConfig):
            config.close()


@_replaces(
    "vllm.lora.worker_manager.WorkerLoRAManager", "_load_adapter",
    "an error of vLLM's for an adapter of which a part would be left out",
)  # fmt: skip
def _load_adapter(original: Original, self: Any, request: Any) -> Any:
    """Refuse adapters for layers that --lora-target-modules does not name.

    Without this, vLLM leaves these parts out silently.
    """
    adapter = original(self, request)
    prepare.refuse_adapted_experts(self._adapter_manager.model, request.lora_path, adapter)
    return adapter


@_replaces(
    "vllm.model_executor.layers.attention.Attention", "process_weights_after_loading",
    "a hook of the attention layer that is called with queries and keys, outside of compiled graphs",
)  # fmt: skip
def _process_attention(original: Original, self: Any, act_dtype: Any) -> None:
    """Give the policy "dymoe" a prompt's queries and keys, for its heavy hitters.

    Attention's implementation is the only code outside of graphs that gets them.
    """
    original(self, act_dtype)
    rank = _rank(self.quant_config)  # runs already: vLLM processes a model's experts before its attention
    tap = None if rank is None else rank.prompts
    attend = self.impl.forward
    if tap is None or getattr(attend, "dymoe_patched", False):
        return

    def forward(layer: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        tap.attend(layer, query, key)
        return attend(layer, query, key, *args, **kwargs)

    forward.dymoe_patched = True  # type: ignore[attr-defined]
    self.impl.forward = forward


@_replaces(
    "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner", "_select_forward",
    "an operator of MoE layers with output arguments, or experts that are chosen inside of the graph",
)  # fmt: skip
def _select_forward(original: Original, self: Any) -> Original:
    """Give the operator outputs that the caller allocates.

    With vLLM's own outputs a CUDA graph would read the tensors of its capture.

    See vLLM issue 37363.
    """
    from vllm_dymoe.vllm_plugin.moe_method import entry_with_buffers

    return entry_with_buffers(self) or original(self)


@_replaces("vllm.v1.engine.async_llm.AsyncLLM", "do_log_stats", _STATS_FIELD)
@_replaces("vllm.v1.engine.llm_engine.LLMEngine", "do_log_stats", _STATS_FIELD)
def _do_log_stats(original: Original, self: Any) -> Awaitable[None] | None:
    """Publish the workers' counts to /metrics and to the log.

    The log is the server's, or that of LLM(). This happens whenever vLLM publishes its own statistics.
    """
    from vllm_dymoe.vllm_plugin.metrics import publish  # not before vLLM has imported prometheus_client

    return publish(self, original(self))
