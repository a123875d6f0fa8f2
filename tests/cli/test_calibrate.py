"""``vllm-dymoe calibrate``: input, calls to the engine, and early refusals."""

import json
from unittest.mock import Mock

import pytest
import torch

import vllm_dymoe
from tests.cli.checkpoints import command, make_model, refused
from vllm_dymoe.executor.rates import RATES
from vllm_dymoe.quantize.recording import CalibrationError, Recording

RECORDING = Recording("0123", "4567", (300, 200), (1, 2), 4, 2, 96, "bfloat16", "silu")


@pytest.fixture
def model(tmp_path):
    model = make_model(tmp_path / "model")
    model.save()
    return model.folder


@pytest.fixture
def asked(monkeypatch):
    """Record the calls to the engine, which never starts."""
    asked = []

    def calibrate(*arguments, progress, **options):
        asked.append((*arguments, options))
        progress(0, 500)
        progress(500, 500)
        return RECORDING

    monkeypatch.setattr(vllm_dymoe, "calibrate", calibrate)
    return asked


def test_texts_of_several_files_are_read(model, asked, tmp_path):
    plain, lines = tmp_path / "plain.txt", tmp_path / "lines.jsonl"
    plain.write_text("one text\nof two lines")
    lines.write_text('{"text": "first"}\n{"text": "sec\u2028ond\x85", "more": 1}\n', encoding="utf-8")
    out = tmp_path / "out"
    result = command("calibrate", model, "--texts", plain, "--texts", lines, "-o", out, "--tokens", 500)
    assert result.exit_code == 0, result.output + result.stderr
    options = {"tokens": 500, "length": 2048, "high": 16, "expert_budget": "auto"}
    assert asked == [(model, ["one text\nof two lines", "first", "sec\u2028ond\x85"], out, options)]
    assert f"-o OUT --calibration {out}" in result.stdout
    assert "2 layers for 500 tokens" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("nowhere.txt", None, "cannot be read"),
        ("latin.txt", b"caf\xe9", "not UTF-8 text"),
        ("lines.jsonl", b'{"text": "a"}\nno json', 'does not have an object with a "text" in each line'),
        ("lines.jsonl", b'{"words": "a"}', 'does not have an object with a "text" in each line'),
        ("lines.jsonl", b"[1]", 'does not have an object with a "text" in each line'),
    ],
)
def test_texts_that_cannot_be_read(model, asked, tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert sentence in refused("calibrate", model, "--texts", tmp_path / name, "-o", tmp_path / "out")
    assert not asked


def test_what_cannot_work_is_refused_before_an_engine_starts(model, asked, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("words")
    command_line = ("calibrate", model, "--texts", text, "-o", tmp_path / "out")
    assert "expert_budget" in refused(*command_line, "--expert-budget", "much")
    assert "does not exist" in refused("calibrate", tmp_path / "nowhere", *command_line[2:])
    assert not asked

    missing = ModuleNotFoundError("No module named 'vllm'", name="vllm")
    for error, said in ((CalibrationError("full."), "vllm-dymoe: full."), (missing, "in vLLM, which is not installed")):
        monkeypatch.setattr(vllm_dymoe, "calibrate", Mock(side_effect=error))
        assert said in refused(*command_line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a link of its own")
def test_without_texts_link_and_host_are_measured_and_kept_for_the_next_start(model, tmp_path):
    store = tmp_path / "store"
    assert command("quantize", model, "-o", store, "--high", 4, "--low", 2).exit_code == 0
    assert "--link 25GB/s" in refused("calibrate", store)
    result = command("calibrate", store, "--link", "1MB/s")
    assert result.exit_code == 0, result.output + result.stderr
    assert "misses are shared, as measured, between 0.0 GB/s of the link and" in result.stdout
    (kept,) = json.loads((store / RATES).read_text()).values()
    assert kept["link"] == pytest.approx(1e6, rel=0.3)
    assert len(kept["first_row"]) == 2
    assert "--out" in refused("calibrate", model, "--texts", tmp_path / "any.txt")
