"""Serve Mixture-of-Experts models whose experts do not fit on the accelerator.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point and
calls it in each of its processes. Importing this package imports nothing heavy.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from vllm_dymoe.quantize.recording import Recording
    from vllm_dymoe.vllm_adapter.report import Summary

__version__ = "0.1.0"


def register() -> None:
    """Make ``--quantization dymoe`` known to vLLM; calling it again changes nothing.

    With a vLLM outside the supported range the name is known, and its use refused.
    """
    from vllm_dymoe.vllm_adapter import register as register_with_vllm

    register_with_vllm()


def timeline(llm: Any, path: "str | PathLike[str]") -> AbstractContextManager[None]:
    """Record what an ``LLM`` does inside a ``with`` block into a file that https://ui.perfetto.dev opens."""
    from vllm_dymoe.vllm_adapter import offline

    return offline.timeline(llm, path)


def summary(llm: Any) -> "Summary":
    """What an ``LLM`` did since its first request or the last reset: print it, or take ``to_dict()``."""
    from vllm_dymoe.vllm_adapter.report import Summary

    return Summary.of(llm)


def calibrate(
    model: Any,
    texts: "Iterable[str]",
    out: "str | Path",
    *,
    tokens: int = 131072,
    length: int = 2048,
    progress: "Callable[[int, int], None]" = lambda done, total: None,
    **options: Any,
) -> "Recording":
    """Record what the experts of a model read while it reads texts, for ``vllm-dymoe quantize --quantizer gptq``.

    Interrupted, it goes on with the first part that is not complete when it is called again.

    Args:
        model: an ``LLM`` with the quantization ``dymoe``, or a folder, for which one is started at 16 bits.
        texts: what the model reads.
        out: folder of the calibration.
        tokens: how many are recorded.
        length: most tokens of a text that are read together.
        progress: called with tokens done and in all.
        options: of the plugin, for a model that is started here.

    Raises:
        RuntimeError: one sentence that says why there is no calibration.
    """
    from vllm_dymoe.vllm_adapter import offline

    return offline.calibrate(model, texts, out, tokens=tokens, length=length, progress=progress, options=options)


def record_trace(
    model: str,
    prompts: "Sequence[tuple[str, str]]",
    folder: "Path",
    *,
    max_tokens: int = 128,
    limit: str = "256MiB",
    inputs: bool = False,
    options: "Mapping[str, Any] | None" = None,
    engine: "Mapping[str, Any] | None" = None,
) -> dict[str, Any]:
    """Answer prompts, each with its domain or an empty name, and record what routers choose; see docs/traces.md."""
    from vllm_dymoe.vllm_adapter import offline

    return offline.record_prompts(model, prompts, folder, max_tokens, limit, inputs, options or {}, engine or {})
