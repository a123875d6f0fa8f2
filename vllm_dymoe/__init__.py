"""Serve Mixture-of-Experts models whose experts do not fit on the accelerator.

vLLM finds :func:`register` through the ``vllm.general_plugins`` entry point and calls it in each of its processes.
Importing this package imports nothing heavy; what users of ``LLM()`` call is in ``vllm_plugin.offline``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_dymoe.vllm_plugin.offline import calibrate, record_trace, summary

# A clone that is the working directory hides an installed package; its kernels/ is next to this folder.
_CLONE = Path(__file__).parents[1]
if (_CLONE / "kernels" / "native.py").is_file():
    __path__.append(str(_CLONE))

__version__ = "0.1.0"
__all__ = ["calibrate", "record_trace", "register", "summary"]


def register() -> None:
    """Register ``--quantization dymoe`` with vLLM.

    If the vLLM version is not supported, using the option raises an error.
    """
    from vllm_dymoe.vllm_plugin import register as register_with_vllm

    register_with_vllm()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_dymoe.vllm_plugin import offline

    return getattr(offline, name)
