"""Serve Mixture-of-Experts models whose experts do not fit on the accelerator.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point and
calls it in each of its processes. Importing this package imports nothing heavy.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from vllm_dymoe.vllm_adapter import Summary

__version__ = "0.1.0"


def register() -> None:
    """Make ``--quantization dymoe`` known to vLLM; calling it again changes nothing.

    With a vLLM outside the supported range the name is known, and its use refused.
    """
    from vllm_dymoe.vllm_adapter import register as register_with_vllm

    register_with_vllm()


def timeline(llm: Any, path: "str | PathLike[str]") -> AbstractContextManager[None]:
    """Record what an ``LLM`` does inside a ``with`` block into a file that https://ui.perfetto.dev opens."""
    from vllm_dymoe.vllm_adapter import record_timeline

    return record_timeline(llm, path)


def summary(llm: Any) -> "Summary":
    """What an ``LLM`` did since its first request or the last reset: print it, or take ``to_dict()``."""
    from vllm_dymoe.vllm_adapter import summarize

    return summarize(llm)
