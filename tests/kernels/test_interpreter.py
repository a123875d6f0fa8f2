"""Run test_triton_*.py in Triton's interpreter, in processes of their own.

On a GPU pytest runs them itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("test_triton_*.py"))
PARTS = 2
"""Two, for two workers; each imports everything again, which takes 6 s. Part k has tests k, k + PARTS, ..."""
assert len(FILES) >= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the files themselves run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter already")
@pytest.mark.timeout(3600)  # for a whole part; each test inside has the usual limit
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "TEST_PART": f"{part} {PARTS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
