"""benchmarks/quality: its measures, and a page that matches its results.

tests/e2e runs it.
"""

import json
import math
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


def test_the_page_is_what_was_measured(tmp_path):
    import report

    copy = tmp_path / "README.md"
    copy.write_text((FOLDER / "README.md").read_text())
    report.write_readme(json.loads((FOLDER / "results.json").read_text()), copy)
    assert copy.read_text() == (FOLDER / "README.md").read_text()
