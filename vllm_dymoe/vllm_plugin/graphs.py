"""Chooses the CUDA graphs around or over MoE layers, and logs the choice.

The device plans, so that a decode step is one graph. Steps with prompts run without graphs, unless every expert is
resident: outside of a graph, experts arrive for one layer while another is computed.

If the inputs of routers are recorded, no graph may contain a MoE layer, because host code in a captured graph would
never run again. vLLM's piecewise graphs are always split at its operator, because workers fall back to them if
attention cannot be captured; its breakable graphs are interrupted by it (``moe_method``).
"""

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.vllm_plugin.announcements import logger
from vllm_dymoe.vllm_plugin.model_files import meets

OPERATOR = "vllm_dymoe::moe_forward_into"
# Modes of graphs that contain MoE layers.
OVER_STEPS = (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE)


def settle_graphs(
    config: VllmConfig,
    *,
    over_layers: bool = True,  # graphs may contain MoE layers: no inputs of routers are recorded
    recorded: bool = False,  # routing is recorded, which only graphs of small-batch steps do
    complete: bool = False,  # every expert is resident in some version, and prompts are computed like other tokens
) -> None:
    """Set the graphs of a finished configuration, and log the choice.

    This includes all values that vLLM has derived from them.
    """
    settings = config.compilation_config
    asked = settings.cudagraph_mode
    sizes = _decode_sizes(config, recorded=recorded) if over_layers else []
    mode, reason = _choose(config, asked, over_steps=bool(sizes))
    pieces = settings.is_attention_compiled_piecewise() and not _breakable()
    if mode == CUDAGraphMode.FULL_DECODE_ONLY and asked == CUDAGraphMode.FULL_AND_PIECEWISE and complete and pieces:
        mode = asked
    settings.cudagraph_mode = mode
    if mode == CUDAGraphMode.NONE:
        # As VllmConfig does without graphs.
        settings.max_cudagraph_capture_size = 0
        settings.cudagraph_capture_sizes = []
    elif pieces and mode != CUDAGraphMode.FULL_AND_PIECEWISE and OPERATOR not in settings.splitting_ops:
        settings.splitting_ops = [*settings.splitting_ops, OPERATOR]
    if mode in OVER_STEPS:
        settings.cudagraph_capture_sizes = sizes
        settings.max_cudagraph_capture_size = sizes[-1]
    if asked != CUDAGraphMode.NONE:
        _say(asked, mode, reason, settings.max_cudagraph_capture_size)


def is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _choose(config: VllmConfig, asked: CUDAGraphMode, *, over_steps: bool) -> tuple[CUDAGraphMode, str]:
    """Choose a mode of graphs; return it and, for NONE, why.

    The mode is FULL_DECODE_ONLY, or PIECEWISE if every MoE layer can stand between graphs, else NONE.
    """
    settings = config.compilation_config
    cut_by_inductor = settings.use_inductor_graph_partition
    if asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE, ""
    if config.model_config.using_transformers_backend():
        return CUDAGraphMode.NONE, "vLLM's Transformers backend runs MoE layers in an operator of its own"
    if over_steps and asked != CUDAGraphMode.PIECEWISE and not cut_by_inductor:
        return CUDAGraphMode.FULL_DECODE_ONLY, ""
    if _breakable():
        return CUDAGraphMode.PIECEWISE, ""
    if not settings.is_attention_compiled_piecewise():
        return CUDAGraphMode.NONE, (
            "the model is not compiled in pieces with attention between them, so graphs would contain whole layers "
            "(for graphs leave mode, splitting_ops and fusions of attention out of --compilation-config)"
        )
    if cut_by_inductor:
        return CUDAGraphMode.NONE, (
            "graphs that Inductor cuts have not been tried with it (for graphs leave use_inductor_graph_partition out "
            "of --compilation-config)"
        )
    return CUDAGraphMode.PIECEWISE, ""


def _breakable() -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled  # imports much of vLLM

    return bool(is_breakable_cudagraph_enabled())


def _decode_sizes(config: VllmConfig, *, recorded: bool) -> list[int]:
    """Return the sizes that vLLM captures whose MoE layers need no host.

    A step of few rows needs a graph of a small batch, or its routing would remain unknown. With speculative decoding a
    size is a number of whole requests, rounded up as vLLM's two runners do, and dropped if it gets too large.
    """
    parallel, speculative = config.parallel_config, config.speculative_config
    most = SMALL_BATCH_ROWS // (parallel.data_parallel_size if meets(parallel) else 1)  # rows of all engines meet
    if speculative is not None and speculative.method == "ngram_gpu":
        return []  # drafts are removed on the device, so the remaining number of rows is not known
    query = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    given = config.compilation_config.cudagraph_capture_sizes or [0]
    sizes = {rows for size in given if query <= (rows := -(-size // query) * query) <= max(given)}
    few = {size for size in sizes if size <= most}
    return sorted(few if recorded or few in (set(), sizes) else sizes | {most // query * query})


def _say(asked: CUDAGraphMode, mode: CUDAGraphMode, reason: str, largest: int) -> None:
    becomes = "" if asked == mode else f" (cudagraph_mode {asked.name} becomes {mode.name})"
    if mode == CUDAGraphMode.FULL_AND_PIECEWISE:
        logger.info(
            "vllm-dymoe: vLLM's CUDA graphs are unchanged and include MoE layers, because every expert is resident."
        )
    elif mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.info(
            "vllm-dymoe: decode steps of up to %d tokens are one CUDA graph, misses included; other steps run without "
            "graphs%s.", largest, becomes,
        )  # fmt: skip
    elif mode == CUDAGraphMode.NONE:
        logger.warning(
            "vllm-dymoe: no CUDA graphs%s, because none can contain whole decode steps, and %s; this costs most in "
            "decode.", becomes, reason,
        )  # fmt: skip
    else:
        (logger.warning if becomes else logger.info)(
            "vllm-dymoe: CUDA graphs are cut at every MoE layer%s, because none can contain whole decode steps; there "
            "are two graphs for each layer.", becomes,
        )  # fmt: skip
