"""Figures, and recorded timelines as pictures. Matplotlib is imported when something is drawn: serving needs none."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dymoe.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {
    "layer": ("#d9dde3", "a MoE layer (between two: attention and the rest)"),
    "predict": ("#8e6bbf", "predicting"),
    "wait": ("#d64545", "waiting for bytes"),
    "compute": ("#3f7fbf", "experts"),
    "step": ("#3f7fbf", "a step"),
    "demand": ("#e08a2e", "transfers in demand"),
    "prefetch": ("#4aa564", "transfers ahead"),
    "migration": ("#9a8f3c", "migration"),
}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches; ConfigError if there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a file that ``vllm_dymoe.timeline`` wrote; ConfigError if it is none."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        if all({"ts", "dur", "pid", "tid", "cat"} <= event.keys() for event in spans) and spans:
            return list(events)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{path} is no timeline, or an empty one; record one with vllm_dymoe.timeline(llm, path) around llm.generate."
    )


def draw_timeline(
    events: Sequence[dict[str, Any]], title: str, out: Path, begin: float | None, end: float | None
) -> None:
    """Draw each lane of each rank as a row, from ``begin`` to ``end`` in milliseconds after the first event."""
    figure = new_figure(12, 2.6)
    axes = figure.subplots()
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    rows = {lane: len(lanes) - 1 - place for place, lane in enumerate(sorted(lanes))}
    spans = [event for event in events if event["ph"] == "X"]
    origin = min(event["ts"] for event in spans)
    seen: dict[str, Any] = {}
    for event in spans:
        left, width = (event["ts"] - origin) / 1e3, event["dur"] / 1e3
        if (end is not None and left > end) or (begin is not None and left + width < begin):
            continue
        color, meaning = _KINDS.get(event["cat"], ("#555555", event["cat"]))
        thick = 0.9 if event["cat"] == "layer" else 0.6
        row = rows[event["pid"], event["tid"]]
        seen[meaning] = axes.barh(row, width, thick, left, color=color, edgecolor="white", linewidth=0.3)
    several = len({rank for rank, _ in lanes}) > 1
    axes.set_yticks(
        list(rows.values()), [f"rank {lane[0]}, {lanes[lane]}" if several else lanes[lane] for lane in rows]
    )
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(begin or 0, end)
    axes.set_xlabel("ms")
    figure.legend(seen.values(), seen.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(out, dpi=110)
