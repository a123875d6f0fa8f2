"""Which CUDA graphs run around or over MoE layers, and the line at start that says so.

A captured graph replays the work of its capture, and host code in it would never run again. Where the device decides
about experts (``runtime.decode_path``) there is none, and a decode step is one graph; steps that read prompts run
without graphs, because the host decides in them.

Where the host always decides no graph may reach over a MoE layer; and a graph behind one reads where its capture has
read, so the layer has to write into a buffer that the graph before it allocated (``moe_method``). Both can be had with
vLLM's piecewise graphs, where the layer's operator is one more at which the compiled model is cut, and with its
breakable graphs, where the operator interrupts the capture. Everywhere else the model runs without graphs. A model is
cut there in any case: vLLM's workers fall back to piecewise graphs if attention cannot be captured.

``cudagraph_mode`` is what all processes go by: wherever it is not NONE, layers write into buffers.
"""

import logging
from dataclasses import dataclass

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_dymoe.config import ConfigError
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.vllm_adapter.report import logger

OPERATOR = "vllm_dymoe::moe_forward_into"


@dataclass(frozen=True)
class Compilation:
    """What vLLM has decided, as far as it matters here.

    Attributes:
        asked: the graphs that vLLM would capture without us.
        decode_sizes: numbers of tokens for which a whole decode step can be captured; none where the host decides.
        breakable: captures can be interrupted, and the model is not compiled.
        cut_at_attention: the model is compiled in pieces, and attention stands between them.
        cut_by_inductor: Inductor makes the pieces, and not vLLM.
        transformers_model: MoE layers run in an operator of vLLM's Transformers backend.
    """

    asked: CUDAGraphMode
    breakable: bool
    cut_at_attention: bool
    cut_by_inductor: bool
    transformers_model: bool
    decode_sizes: tuple[int, ...] = ()


def choose_graphs(compilation: Compilation) -> tuple[CUDAGraphMode, str]:
    """FULL_DECODE_ONLY, or the mode in which every MoE layer stands between graphs, PIECEWISE or NONE.

    Returns:
        The mode, and why it is NONE, if it is.
    """
    if compilation.asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE, ""
    if compilation.transformers_model:
        return CUDAGraphMode.NONE, "vLLM's Transformers backend runs MoE layers in an operator of its own"
    if compilation.decode_sizes and compilation.asked != CUDAGraphMode.PIECEWISE and not compilation.cut_by_inductor:
        return CUDAGraphMode.FULL_DECODE_ONLY, ""
    if compilation.breakable:
        return CUDAGraphMode.PIECEWISE, ""
    if not compilation.cut_at_attention:
        return CUDAGraphMode.NONE, (
            "the model is not compiled in pieces with attention between them, so graphs would contain whole layers "
            "(for graphs leave mode, splitting_ops and fusions of attention out of --compilation-config)"
        )
    if compilation.cut_by_inductor:
        return CUDAGraphMode.NONE, (
            "graphs that Inductor cuts have not been tried with it (for graphs leave use_inductor_graph_partition out "
            "of --compilation-config)"
        )
    return CUDAGraphMode.PIECEWISE, ""


def settle_graphs(config: VllmConfig, *, device_decides: bool = False) -> None:
    """Set the graphs of a finished configuration, with everything that vLLM has derived from them, and say so.

    Args:
        config: vLLM's.
        device_decides: decode steps need no host.
    """
    compilation = _compilation(config, device_decides)
    mode, reason = choose_graphs(compilation)
    settings = config.compilation_config
    settings.cudagraph_mode = mode
    if mode == CUDAGraphMode.NONE:
        # As VllmConfig does where there are no graphs.
        settings.max_cudagraph_capture_size = 0
        settings.cudagraph_capture_sizes = []
    elif not compilation.breakable and compilation.cut_at_attention and OPERATOR not in settings.splitting_ops:
        settings.splitting_ops = [*settings.splitting_ops, OPERATOR]
    if mode == CUDAGraphMode.FULL_DECODE_ONLY:
        settings.cudagraph_capture_sizes = list(compilation.decode_sizes)
        settings.max_cudagraph_capture_size = compilation.decode_sizes[-1]
    _say(compilation.asked, mode, reason)


def leave_layers_out(config: VllmConfig, why: str) -> None:
    """In a worker, before it captures: no graph over MoE layers after all.

    Args:
        config: the worker's.
        why: the device does not decide, for people.
    """
    settings = config.compilation_config
    if settings.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY:
        settings.cudagraph_mode, _ = choose_graphs(_compilation(config, device_decides=False))
        logger.warning(
            "vllm-dymoe: no CUDA graphs over whole decode steps (cudagraph_mode FULL_DECODE_ONLY becomes %s), because "
            "%s.", settings.cudagraph_mode.name, why,
        )  # fmt: skip


def is_captured(x: torch.Tensor) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def refused_capture(layer_name: str) -> ConfigError:
    """Of a layer inside of a capture: what the host decides for it would be replayed for ever.

    The configuration keeps layers out of graphs; a model that calls its experts in a way of its own, or captures graphs
    of its own, gets around it. Then the start of the engine ends here, and nobody reads a wrong answer.
    """
    return ConfigError(
        f"vllm-dymoe: vLLM captures {layer_name} in a CUDA graph, which would use the experts of its capture for "
        'ever; start with --compilation-config \'{"cudagraph_mode": "NONE"}\', and please report this model.'
    )


def _compilation(config: VllmConfig, device_decides: bool) -> Compilation:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    settings = config.compilation_config
    return Compilation(
        asked=settings.cudagraph_mode,
        breakable=is_breakable_cudagraph_enabled(),
        cut_at_attention=settings.is_attention_compiled_piecewise(),
        cut_by_inductor=settings.use_inductor_graph_partition,
        transformers_model=config.model_config.using_transformers_backend(),
        decode_sizes=_decode_sizes(config) if device_decides else (),
    )


def _decode_sizes(config: VllmConfig) -> tuple[int, ...]:
    """Of the sizes that vLLM captures those whose MoE layers the device computes in decode kernels.

    With speculative decoding a size is of whole requests: vLLM rounds its sizes up, and drops what gets too large.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "ngram_gpu":
        return ()  # drafts are taken off on the device, and nobody says there how many rows are left
    query = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
    sizes = tuple(size for size in config.compilation_config.cudagraph_capture_sizes or () if size <= DECODE_ROWS)
    return sizes if sizes and query <= sizes[-1] else ()


def _say(asked: CUDAGraphMode, mode: CUDAGraphMode, reason: str) -> None:
    if asked == CUDAGraphMode.NONE:
        return
    if mode == CUDAGraphMode.FULL_DECODE_ONLY:
        logger.info(
            "vllm-dymoe: decode steps of up to %d tokens are one CUDA graph, experts that are not there included, "
            "because the device decides about them; other steps run without graphs%s.",
            DECODE_ROWS,
            "" if asked == mode else f" (cudagraph_mode {asked.name} becomes {mode.name})",
        )
        return
    if mode == CUDAGraphMode.NONE:
        logger.warning(
            "vllm-dymoe: no CUDA graphs (cudagraph_mode %s becomes NONE), because the host chooses and fetches experts "
            "in every step, and %s; the host launches every operator of a step by itself, which costs most in decode.",
            asked.name,
            reason,
        )
        return
    logger.log(
        logging.INFO if asked == mode else logging.WARNING,
        "vllm-dymoe: CUDA graphs are cut at every MoE layer%s, because the host chooses and fetches experts there in "
        "every step; it launches the operators of these layers one by one, and two graphs for each layer.",
        "" if asked == mode else f" (cudagraph_mode {asked.name} becomes {mode.name})",
    )
