"""Spans of a timeline: a bounded number, on the clock of the device."""

from vllm_dymoe.observe import timeline as timelines
from vllm_dymoe.observe.timeline import HostClock, Lane, Timeline


def test_a_timeline_ends_before_memory_does(monkeypatch):
    monkeypatch.setattr(timelines, "_MOST_SPANS", 3)
    timeline = Timeline(HostClock())
    for place in range(5):
        timeline.add(Lane.HOST, str(place), "wait", float(place), place + 0.5)
    assert [event["name"] for event in timeline.events() if event["ph"] == "X"] == ["0", "1", "2"]
    assert timeline.events()[0]["args"]["name"] == "rank 0, the first 3 spans"
