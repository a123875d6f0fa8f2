"""What is in test_triton_*.py, in Triton's interpreter and processes of its own; on a GPU pytest runs it itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_triton_*.py"))


assert len(FILES) >= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the files themselves run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter already")
@pytest.mark.timeout(3600)  # for a whole file, whose tests have the usual limit each
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
