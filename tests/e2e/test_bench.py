"""``vllm-dymoe bench`` with real engines; a second run repeats no finished row."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from tests.cli.checkpoints import command
from tests.e2e.engines import MODEL, needs_two_cores
from tests.support.forked import run_module
from vllm_dymoe.bench import run
from vllm_dymoe.bench.rows import read_rows

pytestmark = pytest.mark.engine

ENGINE = json.dumps({"max_model_len": 256, "enforce_eager": True})


@pytest.fixture
def started(monkeypatch):
    """Collect the command of every engine, and fork the engines.

    The last test starts its own process, as a user's command does.
    """
    started = []

    def start(command, **how):
        if command[1] != "-m":
            return subprocess.run(command, **how)
        started.append(command)
        return run_module(command, **how)

    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=start, STDOUT=subprocess.STDOUT))
    return started


def test_a_table_of_a_policy_beside_full_load(tmp_path, monkeypatch, started):
    asked = ["bench", MODEL, "--policy", "exact", "--budget", "25%",
             "--batch", 1, "--batch", 2, "--requests", 2, "--warm-up", 1, "--max-tokens", 6, "--out", tmp_path,
             "--engine", ENGINE]  # fmt: skip
    result = command(*map(str, asked))
    assert result.exit_code == 0, result.output
    rows = {(row["label"], row["batch"]): row["measured"] for row in read_rows(tmp_path / "rows.jsonl")[1:]}
    assert len(rows) == 4
    for batch in (1, 2):
        full, exact = rows["full load, 4 bits", batch], rows["exact", batch]
        assert full["outputs"] == exact["outputs"]
        assert full["decode"]["misses"] == 0
        assert exact["decode"]["misses"] > 0
        assert exact["decode_tokens"] == 2 * 5
    assert started
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n| ") == 2 + len(rows)
    monkeypatch.setattr(run, "run_job", lambda job, folder: pytest.fail(json.dumps(job)[:200]))
    assert command(*map(str, asked)).exit_code == 0
    assert (tmp_path / "table.md").read_text() == table


@needs_two_cores
def test_engines_of_data_parallelism_are_one_row(tmp_path, started):
    asked = ["bench", MODEL, "--policy", "exact", "--budget", "25%", "--requests", 5, "--warm-up", 2, "--max-tokens", 6,
             "--dp", 2, "--ep", "--engine", ENGINE, "--out", tmp_path]  # fmt: skip
    result = command(*map(str, asked))
    assert result.exit_code == 0, result.output
    assert len(started) == 2
    for row in read_rows(tmp_path / "rows.jsonl")[1:]:
        measured = row["measured"]
        assert len(measured["outputs"]) == 4, "each engine has as many"
        assert measured["decode_tokens"] == 4 * 5
        # Layers, experts per token, tokens. Summed over both engines, each of which counts for its own experts.
        assert measured["decode"]["hits"] + measured["decode"]["misses"] > 8 * 4 * 4 * 4


def test_prompts_are_measured_cold_cached_and_beside_requests_that_decode(tmp_path):
    asked = [
        "bench",
        MODEL,
        "--prefixes",
        192,
        "--budget",
        "50%",
        "--engine",
        ENGINE,
        "--out",
        tmp_path,
    ]
    result = command(*map(str, asked))
    assert result.exit_code == 0, result.output
    (row,) = read_rows(tmp_path / "rows.jsonl")
    measured = row["measured"]
    assert row["length"] <= row["chunk"]
    reused = row["reused"]  # tokens; times on a busy machine may be in any order
    assert reused["cold"] == 0 < reused["new tail"] <= reused["cached"]
    assert min(measured.values()) > 0
    assert "50%" in result.stdout
