"""Run Triton kernels on a GPU or in Triton's interpreter.

The interpreter must be enabled before triton is imported. So test_interpreter.py runs the files named test_triton_* in
processes of their own; this process does not collect them.
"""

import os
import tempfile
from pathlib import Path

import pytest
import torch

# Triton caches compiled kernels in the home folder, which not every test machine can write to.
if not os.access(Path.home(), os.W_OK):
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="dymoe-test-triton-"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.support.interpreter import quicken

    quicken()
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_triton_*.py"]


def pytest_collection_modifyitems(items):
    """Keep only the part that TEST_PART names.

    Files named on the command line are always collected.
    """
    part, parts = map(int, os.environ.get("TEST_PART", "0 1").split())
    items[:] = items[part::parts]
    for item in items:
        if any(item.path.match(pattern) for pattern in collect_ignore_glob):
            item.add_marker(pytest.mark.skip(reason="no GPU here: test_interpreter.py runs it, or TRITON_INTERPRET=1"))
