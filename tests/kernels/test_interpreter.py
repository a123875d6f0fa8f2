"""Runs test_triton_*.py in Triton's interpreter, in processes of their own; on a GPU pytest runs them itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_triton_*.py"))
PARTS = {"test_triton_launches.py": 4}
"""Files that take minutes run in parts, so that two workers share them: part k of n has tests k, k + n, ..."""
assert len(FILES) >= 3
assert PARTS.keys() <= set(FILES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the files themselves run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter already")
@pytest.mark.timeout(3600)  # for a whole file; each test inside has the usual limit
@pytest.mark.parametrize(("name", "part"), [(name, part) for name in FILES for part in range(PARTS.get(name, 1))])
def test_in_the_interpreter(name, part):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "TEST_PART": f"{part} {PARTS.get(name, 1)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
