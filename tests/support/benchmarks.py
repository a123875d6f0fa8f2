"""Import a benchmark's modules, which import each other by name as scripts do.

Several benchmarks have a report.py, so the modules of one are unloaded before the next.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_dymoe.policies import POLICIES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextlib.contextmanager
def modules_of(name: str) -> Iterator[Path]:
    """Make a benchmark's modules importable within the ``with`` block.

    Yields the benchmark's folder. Afterwards its modules are unloaded, and policies that it registered are removed.
    """
    path, others, policies = list(sys.path), _forget(), dict(POLICIES)
    sys.path.insert(0, str(BENCHMARKS / name))
    try:
        yield BENCHMARKS / name
    finally:
        _forget()
        sys.path[:] = path
        sys.modules.update(others)
        POLICIES.clear()  # a benchmark may have registered more
        POLICIES.update(policies)


def _forget() -> dict[str, object]:
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    ours = [name for name, file in files if file and BENCHMARKS in Path(file).parents]
    return {name: sys.modules.pop(name) for name in ours}
