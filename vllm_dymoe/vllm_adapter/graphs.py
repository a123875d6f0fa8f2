"""Which CUDA graphs run around MoE layers whose experts the host chooses, and the line at start that says so.

A captured graph replays the work of its capture. Host code in it would never run again, so no graph may reach over a
MoE layer; and a graph behind one reads where its capture has read, so the layer has to write into a buffer that the
graph before it allocated (``moe_method``). Both can be had with vLLM's piecewise graphs, where the layer's operator
is one more at which the compiled model is cut, and with its breakable graphs, where the operator interrupts the
capture. Everywhere else the model runs without graphs.

``cudagraph_mode`` is what all processes go by: wherever it is not NONE, layers write into buffers.
"""

import logging
from dataclasses import dataclass

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_dymoe.config import ConfigError
from vllm_dymoe.vllm_adapter.report import logger

OPERATOR = "vllm_dymoe::moe_forward_into"


@dataclass(frozen=True)
class Compilation:
    """What vLLM has decided, as far as it matters here.

    Attributes:
        asked: the graphs that vLLM would capture without us.
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


def choose_graphs(compilation: Compilation) -> tuple[CUDAGraphMode, str]:
    """The mode in which every MoE layer stands between graphs, PIECEWISE or NONE; and why it is NONE, if it is."""
    if compilation.asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE, ""
    if compilation.transformers_model:
        return CUDAGraphMode.NONE, "vLLM's Transformers backend runs MoE layers in an operator of its own"
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


def settle_graphs(config: VllmConfig) -> None:
    """Set the graphs of a finished configuration, with everything that vLLM has derived from them, and say so."""
    compilation = _compilation(config)
    mode, reason = choose_graphs(compilation)
    settings = config.compilation_config
    settings.cudagraph_mode = mode
    if mode == CUDAGraphMode.NONE:
        # As VllmConfig does where there are no graphs.
        settings.max_cudagraph_capture_size = 0
        settings.cudagraph_capture_sizes = []
    elif not compilation.breakable and OPERATOR not in settings.splitting_ops:
        settings.splitting_ops = [*settings.splitting_ops, OPERATOR]
    _say(compilation.asked, mode, reason)


def refuse_capture(x: torch.Tensor, layer_name: str) -> None:
    """Refuse to run a layer inside of a capture: what the host decides for it would be replayed for ever.

    The configuration keeps layers out of graphs; a model that calls its experts in a way of its own, or captures graphs
    of its own, gets around it. Then the start of the engine ends here, and nobody reads a wrong answer.

    Raises:
        ConfigError: the current CUDA stream is capturing.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"vllm-dymoe: vLLM captures {layer_name} in a CUDA graph, which would use the experts of its capture for "
            'ever; start with --compilation-config \'{"cudagraph_mode": "NONE"}\', and please report this model.'
        )


def _compilation(config: VllmConfig) -> Compilation:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    settings = config.compilation_config
    return Compilation(
        asked=settings.cudagraph_mode,
        breakable=is_breakable_cudagraph_enabled(),
        cut_at_attention=settings.is_attention_compiled_piecewise(),
        cut_by_inductor=settings.use_inductor_graph_partition,
        transformers_model=config.model_config.using_transformers_backend(),
    )


def _say(asked: CUDAGraphMode, mode: CUDAGraphMode, reason: str) -> None:
    if asked == CUDAGraphMode.NONE:
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
