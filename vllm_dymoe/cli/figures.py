"""Line charts for `--figure`, drawn by matplotlib, which is an extra."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dymoe.options import ConfigError

SUFFIXES = (".png", ".svg")
LIGHT = {"ink": "#1f2328", "quiet": "#59636e", "grid": "#d1d9e0", "paper": "#ffffff"}
DARK = {"ink": "#f0f6fc", "quiet": "#9198a1", "grid": "#3d444d", "paper": "#0d1117"}
COLOURS = ("#2f81f7", "#e8710a", "#2da44e", "#a371f7", "#d6409f", "#12a5a5", "#bf8700", "#8b949e")
"""Readable on light and dark paper."""
_PANEL_INCHES = 5.2, 3.6


@dataclass
class Panel:
    """One chart: lines of (x, y) by label, and levels.

    Levels are drawn as horizontal lines.
    """

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)


def require(path: Path) -> None:
    """Check that a picture can be written to ``path``, before measuring.

    Raises:
        ConfigError: it cannot.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--figure {path} must end in {' or '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--figure needs matplotlib: pip install 'vllm-dymoe[figures]'.") from error


def style(palette: Mapping[str, str] = LIGHT) -> Any:  # a dictionary; matplotlib's own type names every setting
    """Return settings of matplotlib for a palette; equal input gives an equal file."""
    return {
        "svg.fonttype": "path", "svg.hashsalt": "vllm-dymoe", "font.size": 10, "axes.titlesize": 11,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "grid.linewidth": 0.6, "legend.frameon": False, "lines.linewidth": 2,
        "lines.markersize": 5, "figure.facecolor": palette["paper"], "axes.facecolor": palette["paper"],
        "savefig.facecolor": palette["paper"], "grid.color": palette["grid"], "axes.edgecolor": palette["quiet"],
        "axes.labelcolor": palette["ink"], "axes.titlecolor": palette["ink"], "text.color": palette["ink"],
        "xtick.color": palette["quiet"], "ytick.color": palette["quiet"],
    }  # fmt: skip


def draw(path: Path, panels: Sequence[Panel], *, palette: Mapping[str, str] = LIGHT) -> Path:
    """Write the panels side by side, and return ``path``.

    Raises:
        ConfigError: as for :func:`require`.
    """
    require(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    with rc_context(style(palette)):
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            colours = iter(COLOURS * (1 + (len(panel.lines) + len(panel.levels)) // len(COLOURS)))
            for label, points in panel.lines.items():
                xs, ys = zip(*sorted(points), strict=True)
                axes.plot(xs, ys, marker="o", label=label, color=next(colours))
            for label, level in panel.levels.items():
                axes.axhline(level, linestyle="--", label=label, color=next(colours))
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
