"""Runs model_runner_v2.py in a process of its own.

Its setup for CPUs has to come before vLLM's import.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def test_in_a_process_of_its_own():
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.triton_on_cpu", "-p", "no:cacheprovider"]
    tests = Path(__file__).with_name("model_runner_v2.py")
    process = subprocess.run([*command, "--durations=0", tests], cwd=ROOT, capture_output=True, text=True, timeout=550)
    print(process.stdout[-20000:])
    assert process.returncode == 0, f"{tests} failed; its output is above\n{process.stderr[-2000:]}"
