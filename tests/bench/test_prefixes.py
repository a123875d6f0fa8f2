"""Rows of cold prompts, cached prefixes and decoding requests."""

import json

import pytest

from tests.cli.checkpoints import command, refused
from vllm_dymoe.bench import prefixes
from vllm_dymoe.bench.prefixes import CASES, DECODING, cells, wrong
from vllm_dymoe.bench.rows import append_row


def row(**seconds):
    measured = dict.fromkeys((*CASES, *DECODING), 0.1) | {"cold": 1.0, "beside decoding": 1.1} | seconds
    return {"budget": "25%", "length": 512, "chunk": 256, "decoding": 8, "measured": measured}


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ({}, []),
        ({"cached": 1.1}, ["cached"]),
        ({"new tail": 40.0}, ["new tail"]),
        # Three chunks, because requests that decode take eight places of each, and the step that is under way.
        ({"beside decoding": 1.39}, []),
        ({"beside decoding": 1.41}, ["beside decoding"]),
        ({"longest beside a prompt": 0.8}, []),
        ({"longest beside a prompt": 0.9}, ["longest beside a prompt"]),  # a step, and one and a half chunks
    ],
)
def test_what_is_slower_than_it_should_be_is_named(seconds, found):
    assert wrong(row(**seconds)) == found
    assert cells(row(**seconds))["slower than it should be"] == (", ".join(found) or "nothing")
    assert cells(row(**seconds))["cold, ms"] == "1000.0"


def test_budgets_are_rows_that_are_measured_once(tmp_path, monkeypatch):
    asked = []

    def run_job(job, folder, program):
        asked.append([case["budget"] for case in job["cases"]])
        assert program == prefixes.PROGRAM
        assert job["engine"] == {"enable_prefix_caching": True, "max_model_len": 256}
        for case in job["cases"]:
            append_row(folder / "rows.jsonl", {**row(), **case})

    monkeypatch.setattr(prefixes, "run_job", run_job)
    engine = json.dumps({"max_model_len": 256})
    arguments = ["bench", "benchmarks/tiny_moe/model", "--prefixes", 128, "--engine", engine, "--out", tmp_path]
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    assert "exact" in result.stdout
    assert command(*arguments, "--budget", "25%", "--budget", "75%").exit_code == 0
    assert asked == [["25%", "50%", "100%"], ["75%"]]


def test_random_prompts_have_no_prefixes(tmp_path):
    assert "--prompts" in refused("bench", tmp_path, "--prefixes", 128, "--prompts", "random:64", "--out", tmp_path)
