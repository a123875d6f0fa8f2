"""benchmarks/quality: its measures, and a page that matches its results."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.benchmarks import modules_of

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "quality"


@pytest.fixture(scope="module", autouse=True)
def folder():
    with modules_of("quality"):
        yield


def test_what_is_said_of_answers():
    from losses import Scores, losses

    # Two texts of two tokens over a vocabulary of two; token 1 follows in the first, token 0 in the second.
    texts = [[0, 1], [1, 0]]
    reference = Scores([torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.6, 0.4]]).log()])
    ours = Scores([torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.4, 0.6]]).log()])
    same = losses(reference, reference, texts)
    assert same["perplexity"] == pytest.approx(1 / math.sqrt(0.75 * 0.6))
    assert (same["loss"], same["agreement"]) == (0, 1)
    assert same["kl_nats"] == pytest.approx(0, abs=1e-7)
    found = losses(ours, reference, texts)
    assert found["perplexity"] == pytest.approx(1 / math.sqrt(0.5 * 0.4))
    assert found["loss"] == pytest.approx(found["perplexity"] / same["perplexity"] - 1)
    assert found["agreement"] == 0
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    second = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    assert found["kl_nats"] == pytest.approx((first + second) / 2)
    assert found["kl_error"] == pytest.approx(abs(first - second) / 2)


@pytest.mark.engine
def test_it_runs_and_finds_that_fewer_bits_lose_more():
    """Measure in a process of its own, since its engine stays.

    The benchmark once stopped working without an error.
    """
    script = (
        "from quality import Measurement, dymoe, nested, uniform; m = Measurement(1, 2);"
        "rows = [m.read(uniform(4)), m.read(nested(dymoe(0.5, 2)), decode=True, share=0.5)];"
        "print(*(row['kl_nats'] for row in rows), rows[-1]['moved_bytes_per_token'])"
    )
    environment = os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    four, both, moved = map(float, done.stdout.split()[-3:])
    assert 0 < four < 0.005
    assert 0 < four < both
    assert moved > 0


def test_the_page_is_what_was_measured(tmp_path):
    import report

    copy = tmp_path / "README.md"
    copy.write_text((FOLDER / "README.md").read_text())
    report.write_readme(json.loads((FOLDER / "results.json").read_text()), copy)
    assert copy.read_text() == (FOLDER / "README.md").read_text()
