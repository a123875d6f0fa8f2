"""Pictures of rows: speed over budget, and the distribution of the time between two tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.rows import Row
from vllm_dymoe.bench.summary import QUANTILES


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write what can be drawn of the rows.

    Returns:
        The files; none without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = []
    speeds = [row for row in rows if row["kind"] == "speed" and row["measured"]["tpot_ms"]]
    for name, paint in (("tpot", _over_budget), ("cdf", _distribution)):
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        paint(axes, speeds)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(figure)
        found.append(folder / f"{name}.png")
    return found


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(f"{row['label']}, batch {row['batch']}", []).append(row)
    return series


def _over_budget(axes: Any, rows: Sequence[Row]) -> None:
    for label, points in _series(rows).items():
        memory = [(row["measured"]["decode"] or {}).get("peak_expert_bytes", 0) for row in points]
        times = [row["measured"]["tpot_ms"]["median"] for row in points]
        if all(memory):
            pairs = sorted(zip(memory, times, strict=True))
            axes.plot([nbytes / 1e6 for nbytes, _ in pairs], [ms for _, ms in pairs], "o-", label=label)
        else:
            axes.axhline(times[0], linestyle="--", color="gray", label=label)
    axes.set_xlabel("most device memory of experts, MB")
    axes.set_ylabel("time per output token, ms (median)")
    axes.set_yscale("log")


def _distribution(axes: Any, rows: Sequence[Row]) -> None:
    shares = [step / QUANTILES for step in range(QUANTILES + 1)]
    for row in rows:
        axes.step(row["measured"]["tpot_ms"]["cdf"], shares, where="post",
                  label=f"{row['label']}, {row['budget']}, batch {row['batch']}")  # fmt: skip
    axes.set_xlabel("time per output token, ms")
    axes.set_ylabel("share of tokens")
    axes.set_xscale("log")
