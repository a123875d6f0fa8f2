"""Two kinds of pictures as SVG inside of a page: lines and heat maps. Colours are the page's, light or dark."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 64, 16, 12, 46
_LEVELS = 24
_MOST_NAME = 176  # for names of rows


@dataclass(frozen=True)
class Line:
    """One line of a picture.

    Attributes:
        name: for the legend; a line without one is not in it.
        values: a height for each place, NaN where there is none.
        color: which of the page's colours, 1 to 4; 0 is a faint one, for lines behind others.
        dashed: for what is only compared with.
    """

    name: str
    values: Sequence[float]
    color: int = 1
    dashed: bool = False


def lines(
    drawn: Sequence[Line], x_label: str, y_label: str, *, first: int = 0, mark: tuple[int, str] | None = None
) -> str:
    """Shares, 0 to 1, over whole numbers that begin with ``first``; ``mark`` is a place with a word for it."""
    height = 300
    count = max(len(line.values) for line in drawn)
    highest = max((v for line in drawn for v in line.values if not math.isnan(v)), default=1.0)
    top = next((limit for limit in (0.04, 0.08, 0.2, 0.4, 0.6, 0.8) if highest <= limit), 1.0)
    width_in, height_in = _WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def x(place: float) -> float:
        return _LEFT + width_in * (place / (count - 1) if count > 1 else 0.5)

    def y(value: float) -> float:
        return _TOP + height_in * (1 - value / top)

    parts = []
    for step in range(5):
        value = top * step / 4
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0%}</text>')
    for number in _ticks(first, count):
        where = f'x="{x(number - first):.1f}" y="{height - _BOTTOM + 18}"'
        parts.append(f'<text class="tick" {where} text-anchor="middle">{number}</text>')
    if mark is not None:
        at, word = x(mark[0] - first), html.escape(mark[1])
        parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at + 6:.1f}" y="{_TOP + 12}">{word}</text>')
    for line in drawn:
        kind = f'class="line c{line.color}{" dashed" if line.dashed else ""}"'
        places = [(x(place), y(value)) for place, value in enumerate(line.values) if not math.isnan(value)]
        if places:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
            parts.append(f'<path {kind} d="{path}"/>')
        if line.color and not line.dashed and count <= 64:
            for place, value in enumerate(line.values):
                if not math.isnan(value):
                    title = f"<title>{html.escape(line.name)}, {first + place}: {value:.1%}</title>"
                    parts.append(
                        f'<circle class="c{line.color}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="3">{title}</circle>'
                    )
    parts.append(_labels(height, x_label, y_label))
    return _legend(drawn) + _svg(height, parts, f"{y_label} by {x_label}")


def heat_map(
    values: Sequence[Sequence[float]], x_label: str, y_label: str, unit: str, names: Sequence[str] | None = None
) -> str:
    """Values from 0, rows from top to bottom; the stronger, the larger. Rows may have names in place of numbers."""
    rows, columns = len(values), len(values[0])
    left = _LEFT if names is None else min(_MOST_NAME, 24 + 7 * max(len(name) for name in names))
    cell = (_WIDTH - left - _RIGHT) / columns
    tall = min(22.0, max(3.0, 420 / rows))
    height = round(_TOP + rows * tall + _BOTTOM)
    largest = max(max(row) for row in values) or 1.0
    # One path for each shade: a page with every cell on its own would be megabytes.
    shades: list[list[str]] = [[] for _ in range(_LEVELS + 1)]
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            shades[round(_LEVELS * value / largest)].append(
                f"M{left + column * cell:.1f} {_TOP + (row + 0.5) * tall:.1f}h{cell + 0.05:.2f}"
            )
    parts = [f'<rect class="ground" x="{left}" y="{_TOP}" width="{columns * cell:.1f}" height="{rows * tall:.1f}"/>']
    for shade, paths in enumerate(shades):
        if shade and paths:
            kind = f'class="cells" stroke-width="{tall + 0.05:.2f}" stroke-opacity="{shade / _LEVELS:.3f}"'
            parts.append(f'<path {kind} d="{"".join(paths)}"/>')
    for place in _ticks(0, columns):
        where = f'x="{left + (place + 0.5) * cell:.1f}" y="{height - _BOTTOM + 18}"'
        parts.append(f'<text class="tick" {where} text-anchor="middle">{place}</text>')
    for place in _ticks(0, rows, 12) if names is None else range(rows):
        where = f'x="{left - 8}" y="{_TOP + (place + 0.5) * tall + 4:.1f}"'
        name = place if names is None else html.escape(_shortened(names[place], (left - 24) // 7))
        parts.append(f'<text class="tick" {where} text-anchor="end">{name}</text>')
    parts.append(_labels(height, x_label, y_label if names is None else "", left))
    key = f'<span class="key"><i class="scale"></i>0 to {largest:.1%} {html.escape(unit)}</span>'
    scale = f'<div class="legend">{key}</div>'
    return scale + _svg(height, parts, f"{unit}, by {y_label} and {x_label}")


def _ticks(first: int, count: int, at_most: int = 16) -> list[int]:
    """The first of the numbers, and round ones that are not too close to it."""
    step = next(s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 250, 500, 1000) if count / s <= at_most)
    return [first, *(number for number in range(0, first + count, step) if number >= first + (step + 1) // 2)]


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _labels(height: int, x_label: str, y_label: str, left: int = _LEFT) -> str:
    middle = _TOP + (height - _TOP - _BOTTOM) / 2
    return (
        f'<text class="label" x="{left + (_WIDTH - left - _RIGHT) / 2}" y="{height - 8}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
        f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
    )


def _legend(drawn: Sequence[Line]) -> str:
    keys = []
    for line in drawn:
        if line.name:
            sample = f'<i class="c{line.color}{" dashed" if line.dashed else ""}"></i>'
            keys.append(f'<span class="key">{sample}{html.escape(line.name)}</span>')
    return f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""


def _svg(height: int, parts: Sequence[str], title: str) -> str:
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    return f'<div class="wide">{svg}</div>'  # a small window scrolls it: letters would be too small to read otherwise
