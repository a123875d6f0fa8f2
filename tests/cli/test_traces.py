"""``vllm-dymoe trace`` and ``vllm-dymoe report``: what is asked for, what is written, and what is refused."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

import vllm_dymoe
from tests.cli.checkpoints import command, refused
from vllm_dymoe.observe.synthetic import synthetic_trace
from vllm_dymoe.observe.trace_page import page
from vllm_dymoe.residency.identity import ModelIdentity

HEADER = ModelIdentity("a <model> & more", "synthetic", num_layers=4, num_experts=16, top_k=2, hidden=8)


@pytest.fixture
def trace():
    return synthetic_trace(HEADER, requests=6, prompt=8, decode=24)


@pytest.fixture
def asked(monkeypatch):
    """What the engine would be asked for; none is started."""
    found = {}

    def record_trace(model, prompts, folder, **settings):
        found.update(settings, model=model, prompts=prompts, folder=folder)
        return {"tokens": 1234, "bytes": 5000, "folder": str(folder), "recording": len(prompts) < 3}

    monkeypatch.setattr(vllm_dymoe, "record_trace", record_trace)
    return found


def test_the_command_asks_for_what_it_was_told(tmp_path, asked):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    result = command("trace", "a/model", "--prompts", path, "--out", tmp_path / "out", "--max-tokens", 7, "--inputs",
                     "--limit", "1GiB", "--options", '{"hi": 16}', "--engine", '{"max_model_len": 99}')  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked == {
        "model": "a/model",
        "prompts": ["one", "two"],
        "folder": tmp_path / "out",
        "max_tokens": 7,
        "limit": "1GiB",
        "inputs": True,
        "options": {"hi": 16},
        "engine": {"max_model_len": 99},
    }
    assert "1234 tokens of 2 prompts, 4.9 KiB" in result.stdout
    assert f"vllm-dymoe report {tmp_path / 'out'}" in result.stdout
    assert "ends early" not in result.stdout
    path.write_text("one\ntwo\nthree\n")
    assert "ends early" in command("trace", "m", "--prompts", path, "--out", tmp_path).stdout


def test_what_cannot_be_recorded_is_refused_in_a_sentence(tmp_path, asked):
    path, out = tmp_path / "prompts.txt", tmp_path / "out"
    assert "cannot be read" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("\n \n")
    assert "has no prompts" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as prompts" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("one")
    assert "--options is not JSON" in refused("trace", "m", "--prompts", path, "--out", out, "--options", "{")
    assert "--engine has to be a JSON object" in refused("trace", "m", "--prompts", path, "--out", out, "--engine", "3")
    assert asked == {}


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def headings(text):
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_the_page_has_every_picture_and_needs_nothing_else(trace, tmp_path):
    trace.save(tmp_path / "trace.safetensors")
    result = command("report", tmp_path, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page.html").read_text()
    assert text == page(trace)
    links = re.findall(r'(?:src|href)="(.*?)"|url\((.*?)\)', text)
    assert all(link.startswith(("#", "data:image/png")) for pair in links for link in pair if link)
    assert "<script" not in text
    assert re.findall(r"<(\w+)>[^<]*a &lt;model&gt; &amp; more", text) == ["title", "h1", "p"]
    assert "<model>" not in text
    assert len(pictures(text)) == len(headings(text)) == text.count('class="seen"') == 4
    assert not re.search(r"\bnan", text)


def test_pictures_of_inputs_are_there_if_the_trace_has_them(trace):
    inputs = torch.randn(trace.num_tokens, 4, 8).half()
    more = headings(page(replace(trace, router_inputs=inputs, next_gate=trace.experts[:, 1:].clone())))
    assert set(more) - set(headings(page(trace))) == {"Looking ahead with the next gate"}


@pytest.mark.parametrize("what", ["one token", "only prompts", "only answers", "one layer"])
def test_small_traces_have_a_page_too(trace, what):
    if what == "one token":
        trace = trace.select(torch.tensor([5]))
    elif what == "only prompts":
        trace = trace.select(trace.prefill)
    elif what == "only answers":
        trace = trace.select(~trace.prefill)
    else:
        trace = synthetic_trace(replace(HEADER, num_layers=1), requests=2, prompt=2, decode=2)
    text = page(trace)
    assert all(len(picture) for picture in pictures(text))
    assert not re.search(r"\bnan", text)


def test_what_cannot_be_shown_is_refused_in_a_sentence(trace, tmp_path):
    trace.save(tmp_path / "trace.safetensors")
    assert "cannot be written" in refused("report", tmp_path, "--out", tmp_path / "absent" / "page.html")
    assert "does not exist" in refused("report", tmp_path / "absent")
