"""``vllm-dymoe timeline``: a recorded timeline as a picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

_COLOURS = {
    "layer": "#d9dde3",
    "predict": "#8e6bbf",
    "wait": "#d64545",
    "compute": "#3f7fbf",
    "demand": "#e08a2e",
    "prefetch": "#4aa564",
    "migration": "#9a8f3c",
}
_MEANING = {
    "layer": "a MoE layer (between two: attention and the rest)",
    "predict": "predicting",
    "wait": "waiting for bytes",
    "compute": "experts",
    "demand": "transfers in demand",
    "prefetch": "transfers ahead",
    "migration": "migration",
}


class TimelineError(ValueError):
    """A file that is no timeline, or cannot be drawn."""


def run(trace: Path, out: Path, *, begin: float | None, end: float | None) -> None:
    """Draw a trace.

    Args:
        trace: the JSON file.
        out: PNG, SVG or PDF to write.
        begin: milliseconds after the first event; None for the first.
        end: as ``begin``; None for the last.
    """
    events = read(trace)
    draw({trace.stem: events}, out, begin, end)
    Console().print(f"{sum(event['ph'] == 'X' for event in events)} spans of {trace} drawn: {out}", highlight=False)


def read(trace: Path) -> list[dict[str, Any]]:
    """The events of a file.

    Raises:
        TimelineError: it is no trace.
    """
    try:
        events = json.loads(trace.read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        if all({"ts", "dur", "pid", "tid", "cat"} <= event.keys() for event in spans) and spans:
            return list(events)
    except (ValueError, KeyError, TypeError):
        pass
    raise TimelineError(
        f"{trace} is no timeline, or an empty one; record one with vllm_dymoe.timeline(llm, path) around llm.generate."
    )


def draw(
    timelines: Mapping[str, Sequence[Mapping[str, Any]]],
    out: Path,
    begin: float | None = None,
    end: float | None = None,
) -> None:
    """Draw timelines above one another, on one scale, each rank and lane a row.

    Args:
        timelines: events by title.
        out: the picture; its format is that of its name.
        begin: milliseconds after each timeline's first event.
        end: as ``begin``.
    """
    try:
        import matplotlib
    except ImportError:
        raise TimelineError("drawing needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, all_axes = pyplot.subplots(
        len(timelines), 1, figsize=(12, 0.9 + 1.7 * len(timelines)), sharex=True, squeeze=False
    )
    seen: set[str] = set()
    for axes, (title, events) in zip(all_axes[:, 0], timelines.items(), strict=True):
        lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        spans = [event for event in events if event["ph"] == "X"]
        origin = min(event["ts"] for event in spans)
        rows = {lane: len(lanes) - 1 - place for place, lane in enumerate(sorted(lanes))}
        for event in spans:
            left, width = (event["ts"] - origin) / 1e3, event["dur"] / 1e3
            if (end is not None and left > end) or (begin is not None and left + width < begin):
                continue
            seen.add(event["cat"])
            thick = 0.9 if event["cat"] == "layer" else 0.6
            row = rows[event["pid"], event["tid"]]
            axes.barh(
                row, width, left=left, height=thick, color=_COLOURS[event["cat"]], edgecolor="white", linewidth=0.3
            )
        several = len({rank for rank, _ in lanes}) > 1
        names = [f"rank {lane[0]}, {lanes[lane]}" if several else lanes[lane] for lane in rows]
        axes.set_yticks(list(rows.values()), names)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(begin or 0, end)
    all_axes[-1, 0].set_xlabel("ms")
    patches = [Patch(color=_COLOURS[kind], label=_MEANING[kind]) for kind in _COLOURS if kind in seen]
    figure.legend(handles=patches, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.11 if len(timelines) == 1 else 0.08, 1, 1))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
