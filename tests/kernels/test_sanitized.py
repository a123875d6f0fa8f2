"""The library of ``make sanitize``, with which other tests run, reports a fault."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "memory" not in os.environ.get("SANITIZED_LIBRARY", ""), reason="make sanitize builds it"
)

BEYOND = """
import torch
from vllm_dymoe.kernels import native
rows, weights, into = torch.zeros(1, 64).bfloat16(), torch.ones(1, 4096), torch.zeros(1, 64).bfloat16()
native.load().weighted_sum(rows, weights, into)
print("not noticed")
"""


def test_a_read_beyond_a_tensor_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", BEYOND], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "not noticed" not in ended.stdout
    assert "heap-buffer-overflow" in ended.stderr
