"""Which CUDA graphs run around or over MoE layers, and the line at start that says so.

Host code in a captured graph would never run again. Where the device decides about experts (``runtime.decode_path``)
there is none, and a decode step is one graph; steps that read prompts run without, because the host decides in them.

Where the host always decides no graph may reach over a MoE layer; and a graph behind one reads where its capture has
read, so the layer writes into a buffer that the graph before it allocated (``moe_method``). Both can be had with vLLM's
piecewise graphs, where the layer's operator is one more at which the compiled model is cut, and with its breakable
graphs, where the operator interrupts the capture; elsewhere the model runs without graphs. It is cut there in any case:
vLLM's workers fall back to piecewise graphs if attention cannot be captured.
"""

import logging

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_dymoe.config import ConfigError
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.vllm_adapter.announcements import logger

OPERATOR = "vllm_dymoe::moe_forward_into"


def settle_graphs(config: VllmConfig, *, device_decides: bool = False) -> None:
    """Set the graphs of a finished configuration, with everything that vLLM has derived from them, and say so."""
    settings = config.compilation_config
    asked = settings.cudagraph_mode
    sizes = _decode_sizes(config) if device_decides else []
    mode, reason = _choose(config, asked, over_steps=bool(sizes))
    settings.cudagraph_mode = mode
    if mode == CUDAGraphMode.NONE:
        # As VllmConfig does where there are no graphs.
        settings.max_cudagraph_capture_size = 0
        settings.cudagraph_capture_sizes = []
    elif not _breakable() and settings.is_attention_compiled_piecewise() and OPERATOR not in settings.splitting_ops:
        settings.splitting_ops = [*settings.splitting_ops, OPERATOR]
    if mode == CUDAGraphMode.FULL_DECODE_ONLY:
        settings.cudagraph_capture_sizes = sizes
        settings.max_cudagraph_capture_size = sizes[-1]
    if asked != CUDAGraphMode.NONE:
        _say(asked, mode, reason)


def leave_layers_out(config: VllmConfig, why: str) -> None:
    """In a worker, before it captures: no graph over MoE layers after all, because the device does not decide."""
    settings = config.compilation_config
    if settings.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        settings.cudagraph_mode, _ = _choose(config, settings.cudagraph_mode, over_steps=False)
        logger.warning(
            "vllm-dymoe: no CUDA graphs over whole decode steps (cudagraph_mode FULL_DECODE_ONLY becomes %s), because "
            "%s.", settings.cudagraph_mode.name, why,
        )  # fmt: skip


def is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def refused_capture(layer_name: str) -> ConfigError:
    return ConfigError(
        f"vllm-dymoe: vLLM captures {layer_name} in a CUDA graph, which would use the experts of its capture for "
        'ever; start with --compilation-config \'{"cudagraph_mode": "NONE"}\', and please report this model.'
    )


def _choose(config: VllmConfig, asked: CUDAGraphMode, *, over_steps: bool) -> tuple[CUDAGraphMode, str]:
    """FULL_DECODE_ONLY, or PIECEWISE where every MoE layer can stand between graphs, else NONE and why."""
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


def _decode_sizes(config: VllmConfig) -> list[int]:
    """Of the sizes that vLLM captures those whose MoE layers the device computes in decode kernels.

    With speculative decoding a size is of whole requests: vLLM rounds its sizes up, and drops what gets too large.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "ngram_gpu":
        return []  # drafts are taken off on the device, where the number of rows that are left is not known
    query = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    sizes = [size for size in config.compilation_config.cudagraph_capture_sizes or () if size <= DECODE_ROWS]
    return sizes if sizes and query <= sizes[-1] else []


def _say(asked: CUDAGraphMode, mode: CUDAGraphMode, reason: str) -> None:
    becomes = "" if asked == mode else f" (cudagraph_mode {asked.name} becomes {mode.name})"
    if mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.info(
            "vllm-dymoe: decode steps of up to %d tokens are one CUDA graph, experts that are not there included, "
            "because the device decides about them; other steps run without graphs%s.", DECODE_ROWS, becomes,
        )  # fmt: skip
    elif mode == CUDAGraphMode.NONE:
        logger.warning(
            "vllm-dymoe: no CUDA graphs%s, because the host chooses and fetches experts in every step, and %s; the "
            "host launches every operator of a step by itself, which costs most in decode.", becomes, reason,
        )  # fmt: skip
    else:
        logger.log(
            logging.WARNING if becomes else logging.INFO,
            "vllm-dymoe: CUDA graphs are cut at every MoE layer%s, because the host chooses and fetches experts there "
            "in every step; it launches the operators of these layers one by one, and two graphs for each layer.",
            becomes,
        )
