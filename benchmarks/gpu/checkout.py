"""Makes vllm_dymoe.kernels importable from a bare checkout, where nothing is installed."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def missing(*modules: str) -> list[str]:
    """Those of the modules that are not installed."""
    return sorted(name for name in modules if importlib.util.find_spec(name) is None)


def find_package() -> None:
    """Put the checkout's packages in reach; a package that is installed already stays the one that is used."""
    if importlib.util.find_spec("vllm_dymoe") is not None:
        return
    sys.path.insert(0, str(ROOT))
    # kernels/ lies beside vllm_dymoe/, where an install would look for vllm_dymoe/kernels.
    import vllm_dymoe

    spec = importlib.util.spec_from_file_location(
        "vllm_dymoe.kernels", ROOT / "kernels" / "__init__.py", submodule_search_locations=[str(ROOT / "kernels")]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    vllm_dymoe.kernels = module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
