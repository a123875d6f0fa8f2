"""Timelines as pictures, and as sentences where there is none."""

import json

import pytest

from tests.cli.checkpoints import command
from vllm_dymoe.observe import timeline as timelines
from vllm_dymoe.observe.timeline import HostClock, Lane, Timeline


def run(*arguments):
    return command("timeline", *arguments)


@pytest.fixture
def trace(tmp_path):
    ranks = []
    for rank in range(2):
        timeline = Timeline(HostClock())
        timeline.add(Lane.HOST, "layer 0", "layer", 1.0, 1.01)
        timeline.add(Lane.LINK, "layer 0, expert 3, all of it", "demand", 1.002, 1.006)
        timeline.add(Lane.COMPUTE, "layer 0, expert 3", "compute", 1.006, 1.009)
        ranks += timeline.events(rank)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": ranks}))
    return path


def test_a_picture_is_drawn_with_a_row_for_each_lane(trace, tmp_path):
    answer = run(trace, "--out", tmp_path / "all.svg")
    assert answer.exit_code == 0, answer.output
    assert "6 spans" in answer.output
    drawing = (tmp_path / "all.svg").read_text()
    for text in ("rank 0, link", "rank 1, compute", "transfers in demand"):
        assert f"<!-- {text} -->" in drawing
    assert "transfers ahead" not in drawing, "nothing of that kind happened"


def test_a_part_of_it(trace, tmp_path):
    assert run(trace, "-o", tmp_path / "part.svg", "--begin", "6.5", "--end", "8").exit_code == 0
    drawing = (tmp_path / "part.svg").read_text()
    assert "<!-- experts -->" in drawing
    assert "<!-- transfers in demand -->" not in drawing


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}', "\x00"])
def test_what_is_no_timeline(text, tmp_path):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    answer = run(path, "-o", tmp_path / "out.png")
    assert answer.exit_code == 1
    assert "is no timeline" in answer.stderr
    assert not (tmp_path / "out.png").exists()


def test_a_timeline_ends_before_memory_does(monkeypatch):
    monkeypatch.setattr(timelines, "_MOST_SPANS", 3)
    timeline = Timeline(HostClock())
    for place in range(5):
        timeline.add(Lane.HOST, str(place), "wait", float(place), place + 0.5)
    assert [event["name"] for event in timeline.events() if event["ph"] == "X"] == ["0", "1", "2"]
    assert timeline.events()[0]["args"]["name"] == "rank 0, the first 3 spans"
