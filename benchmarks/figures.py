"""`make figures`: draw the pictures of README.md and docs/.

They are drawn from committed results, each for light and dark pages.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from vllm_dymoe.cli.figures import COLOURS, DARK, LIGHT, style

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BUDGET = ROOT / "benchmarks" / "budget" / "results.json"
TIERS = ROOT / "benchmarks" / "memory_tiers" / "results.json"
GPU = ROOT / "benchmarks" / "gpu" / "gpu-NVIDIA-H200-2026-11-26.json"
PALETTES = {"light": LIGHT, "dark": DARK}
BLUE, ORANGE, GREEN, PURPLE = COLOURS[:4]
Palette = Mapping[str, str]


def digest(*sources: Path) -> str:
    """Return a digest of a picture's data.

    The picture contains the digest; a test compares the two.
    """
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def speed(palette: Palette) -> Figure:
    """Draw tokens per second by memory for experts.

    One chart shows a model that fits into memory, the other one that does not.
    """
    figure = Figure(figsize=(10.4, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _budgets(left, json.loads(BUDGET.read_text()), palette)
    _tiers(right, json.loads(TIERS.read_text()), palette)
    figure.get_layout_engine().set(wspace=0.06)
    return figure


def _budgets(axes: Any, found: dict[str, Any], palette: Palette) -> None:
    rows = [row for row in found["rows"] if row["batch"] == 1]
    series = (
        ("all in memory, dense layers at 8 bits", "experts pinned in memory, dense layers at 8 bits", GREEN, 87),
        ("all in memory", "experts pinned in memory", BLUE, 76),
        ("exact", "experts in files", PURPLE, 67),
    )
    for name, label, colour, height in series:
        points = sorted((row["experts peak MB"] / 1e3, row["tokens/s"]) for row in rows if row["policy"] == name)
        axes.plot(*zip(*points, strict=True), marker="o", color=colour)
        axes.text(2.3, height, label, color=colour, fontsize=9, va="center")
    (vllm,) = (row for row in rows if row["policy"] == "vllm")
    everything = found["expert_bytes_at_16_bits"] / 1e9
    axes.plot([everything], [vllm["tokens/s"]], marker="s", color=ORANGE, markersize=8)
    axes.text(everything, vllm["tokens/s"] - 6, "vLLM at 16 bits", color=ORANGE, fontsize=9, ha="center", va="center")
    axes.set_axisbelow(True)
    axes.set_title("Six layers of Qwen3-30B-A3B's size, one request", pad=22)
    _subtitle(axes, "on a CPU; vllm-dymoe at 4 bits, with budgets from 0.02 GB up", palette)
    axes.set(xlabel="memory for experts, GB", ylabel="tokens per second")
    axes.set_xlim(-0.15, 8.1)
    axes.set_ylim(0, 95)


def _subtitle(axes: Any, text: str, palette: Palette) -> None:
    axes.text(0, 1.02, text, transform=axes.transAxes, color=palette["quiet"], fontsize=9, in_layout=False)


def _tiers(axes: Any, found: dict[str, Any], palette: Palette) -> None:
    names = {
        "llama.cpp, mmap": ("llama.cpp\nmmap", ORANGE),
        "dymoe, page cache": ("vllm-dymoe\npage cache", PURPLE),
        "dymoe, host_memory": ("vllm-dymoe\nhost_memory", BLUE),
    }
    for place, (name, (_, colour)) in enumerate(names.items()):
        for side, (load, alpha) in enumerate((("one", 0.55), ("eight", 1.0))):
            rate = found["runs"][name][load]["tokens_per_second"]
            x = place + 0.4 * side - 0.2
            axes.bar(x, rate, 0.36, color=colour, alpha=alpha)
            axes.annotate(f"{rate:.0f}", (x, rate), (0, 3), textcoords="offset points", ha="center", fontsize=9)
            axes.annotate({"one": "1", "eight": "8"}[load], (x, 0), (0, -11), textcoords="offset points",
                          ha="center", fontsize=8, color=palette["quiet"])  # fmt: skip
    axes.set_xticks(range(len(names)), [label for label, _ in names.values()], fontsize=9)
    axes.tick_params(axis="x", length=0, pad=14, labelcolor=palette["ink"])
    share = found["memory_bytes"] / found["experts_bytes"]
    axes.set_title("A model larger than memory, experts on disk", pad=22)
    _subtitle(axes, f"memory for {share:.0%} of the experts, 4 bits; 1 and 8 requests at once", palette)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 85)
    axes.set_ylabel("tokens per second")


def gpu(palette: Palette) -> Figure:
    """Draw a layer's time on a GPU and its bound, by the share of resident experts."""
    figure = Figure(figsize=(10.4, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = json.loads(GPU.read_text())
    rows = {row["name"]: row for row in found["parts"]["speeds"]["speeds"]}

    def points(name: str, number: str) -> list[tuple[float, float]]:
        """Return pairs of the resident share in percent and the time in us."""
        shares = ((share, rows.get(name.format(share))) for share in (25, 50, 100))
        return [(share, row[number]) for share, row in shares if row is not None]

    decode, ahead, shared, prefill = (
        f"{phase} decided on the device, misses {misses}, {{}}%, {count} projections ahead, a layer"
        for phase, misses, count in (
            ("decode", "fetch", 0), ("decode", "fetch", 3), ("decode", "share", 0), ("prefill", "fetch", 0),
        )
    )  # fmt: skip
    for axes, title, lines, bound in (
        (left, "Decode, one token", {
            "misses fetched": (decode, PURPLE), "and the next layer prefetched": (ahead, BLUE),
            "the CPU computes a share": (shared, GREEN),
        }, decode),
        (right, "Prefill, 2048 tokens", {"misses fetched": (prefill, PURPLE)}, prefill),
    ):  # fmt: skip
        axes.plot(*zip(*points(bound, "bound"), strict=True), linestyle="--", color=palette["quiet"],
                  label="bound of fetching: link, memory")  # fmt: skip
        for label, (name, colour) in lines.items():
            axes.plot(*zip(*points(name, "measured"), strict=True), marker="o", color=colour, label=label)
        axes.set_title(title, pad=22)
        _subtitle(axes, f"{found['card']}, one layer of Qwen3-30B-A3B's size, 4 bits", palette)
        axes.set(xlabel="experts resident, %", ylabel="microseconds a layer")
        axes.set_xlim(0, 104)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=9)
    figure.get_layout_engine().set(wspace=0.06)
    return figure


def architecture(palette: Palette) -> Figure:
    """Draw the places of experts, and the transfers between them."""
    figure = Figure(figsize=(10.4, 5.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 104), ylim=(0, 54))
    axes.axis("off")
    grey = palette["quiet"]

    def box(x: float, y: float, height: float, title: str, lines: str, colour: str) -> None:
        axes.add_patch(FancyBboxPatch(
            (x, y), 24, height, boxstyle="round,pad=0,rounding_size=1", facecolor=colour + "22", edgecolor=colour,
            linewidth=1.5,
        ))  # fmt: skip
        axes.text(x + 1.6, y + height - 2.6, title, fontsize=11, fontweight="bold", va="center")
        axes.text(x + 1.6, y + height - 4.9, lines, fontsize=9, va="top", color=grey, linespacing=1.4)

    def arrow(*points: tuple[float, float], colour: str) -> None:
        axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=1.8, solid_capstyle="butt")
        axes.add_patch(FancyArrowPatch(
            points[-2], points[-1], arrowstyle="-|>", mutation_scale=14, linewidth=1.8, color=colour, shrinkA=0,
            shrinkB=0,
        ))  # fmt: skip

    def label(x: float, y: float, text: str, colour: str = grey, align: str = "center") -> None:
        axes.text(x, y, text, fontsize=9, color=colour, ha=align, va="center", linespacing=1.35)

    left, middle, right = 2, 40, 78
    box(left, 36, 12, "vLLM", "attention, router,\nshared experts, sampling", grey)
    box(middle, 36, 12, "Planner", "by the policy's numbers:\none plan a layer", ORANGE)
    box(right, 36, 12, "Kernels", "gate and up, then down,\non packed weights", GREEN)
    box(middle, 20, 9, "CPU worker", "computes some misses", BLUE)
    box(left, 2, 12, "Disk", "the store: every expert,\npacked, with checksums", PURPLE)
    box(middle, 2, 12, "Host memory", "pinned: all experts, or\na cache of some", BLUE)
    box(right, 2, 12, "Device slots", "the budget: kept experts,\nand staging slots", GREEN)
    arrow((left + 24, 42), (middle, 42), colour=grey)
    label(33, 45, "hidden states,\nexpert ids")
    arrow((middle + 24, 42), (right, 42), colour=ORANGE)
    label(71, 43.6, "plan", ORANGE)
    arrow((right + 12, 48), (right + 12, 51), (left + 12, 51), (left + 12, 48), colour=grey)
    label(middle + 12, 52.4, "weighted sum of the experts' outputs")
    arrow((left + 24, 8), (middle, 8), colour=PURPLE)
    label(33, 9.6, "reads", PURPLE)
    label(33, 5.4, "many at once")
    arrow((middle + 24, 8), (right, 8), colour=BLUE)
    label(71, 9.6, "link", BLUE)
    label(71, 5.4, "misses and\nprefetches")
    arrow((right + 12, 14), (right + 12, 36), colour=GREEN)
    label(right + 13.2, 25, "packed\nbytes", GREEN, "left")
    arrow((middle + 12, 14), (middle + 12, 20), colour=BLUE)
    label(middle + 13.2, 17, "packed bytes", BLUE, "left")
    arrow((middle + 24, 24.5), (right + 5, 24.5), (right + 5, 36), colour=BLUE)
    label(73, 26.1, "outputs", BLUE)
    return figure


def main() -> None:
    """Draw every picture in both palettes."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    pictures = {"speed": (speed, (BUDGET, TIERS)), "gpu": (gpu, (GPU,)), "architecture": (architecture, ())}
    for name, (make, sources) in pictures.items():
        for page, palette in PALETTES.items():
            path = IMAGES / f"{name}-{page}.svg"
            with rc_context(style(palette)):
                make(palette).savefig(path, metadata={"Date": None, "Source": digest(*sources)})
            print(f"figures: wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
