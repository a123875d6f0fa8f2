"""Figures. Matplotlib is imported when something is drawn: serving needs none."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_dymoe.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches; ConfigError if there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def lines(
    drawn: Mapping[str, torch.Tensor], x: str, y: str, *, first: int = 0, mark: tuple[int, str] = (-1, "")
) -> str:
    """Shares by name over whole numbers from ``first``, as SVG; what is by chance is dashed, a marked number dotted."""
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    for name, values in drawn.items():
        style: dict[str, Any] = {"marker": "."} if len(values) <= 64 else {}
        style = {"linestyle": "--", "color": "#7a7f85"} if name.startswith("by chance") else style
        axes.plot(range(first, first + len(values)), values.numpy(), label=name, **style)
    if mark[1]:
        axes.axvline(mark[0], color="#5d6970", linestyle=":", label=mark[1])
    axes.set(xlabel=x, ylabel=y, ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    return _svg(figure)


def heat_map(values: torch.Tensor, x: str, y: str) -> str:
    """Shares [rows, columns] from 0 as SVG, rows from top to bottom."""
    figure = new_figure(8, min(6.0, max(1.6, 0.25 * len(values))))
    axes = figure.subplots()
    image = axes.imshow(values.numpy(), cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.set(xlabel=x, ylabel=y)
    axes.locator_params(integer=True)
    figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:.1%}")
    return _svg(figure)


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vllm-dymoe"}), io.StringIO() as stream:
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
        text = stream.getvalue()
    return text[text.index("<svg") :]
