"""What was measured, for people: a table, aims beside numbers, and a picture."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model import EXPERTS, HIDDEN, INTERMEDIATE
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

QUALITY = Path(__file__).resolve().parents[1] / "quality"
HEAD = ["", "TTFT ms", "TPOT ms", "p99 ms", "tokens/s, 1", "tokens/s, 16", "hits", "moved GB", "experts GB", "peak GB"]


def rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """One row for each case of each system."""
    for system, data in results["systems"].items():
        for name, case in data["cases"].items():
            batch = case["batch_16_tokens_per_second"]
            yield [
                f"{system}, {name}",
                f"{case['ttft_ms']:.0f}",
                f"{case['tpot_ms']:.1f}",
                f"{case['tpot_p99_ms']:.1f}",
                f"{case['batch_1_tokens_per_second']:.2f}",
                "" if batch is None else f"{batch:.1f}",
                f"{case['hit_rate']:.0%}" if "hit_rate" in case else "",
                f"{case['bytes_moved'] / 1e9:.1f}" if "bytes_moved" in case else "",
                f"{case['peak_expert_bytes'] / 1e9:.3g}" if "peak_expert_bytes" in case else "",
                f"{data['peak_memory_bytes'] / 1e9:.1f}",
            ]


def aims(results: dict[str, Any]) -> Iterator[list[str]]:
    """Aim, what was reached, and what it is made of."""
    systems = results["systems"]
    if not {"vLLM", "dymoe"} <= set(systems):
        return
    ours, theirs = systems["dymoe"], systems["vLLM"]["cases"]["all in memory"]
    full = ours["cases"]["100%"]
    yield [
        "TPOT at full residency, of vLLM's unquantized",
        "at most 0.60",
        f"{full['tpot_ms'] / theirs['tpot_ms']:.2f}",
        f"{full['tpot_ms']:.1f} ms of {theirs['tpot_ms']:.1f} ms",
    ]
    yield [
        "batch 16, of batch 1's tokens per second",
        "at least 4",
        f"{full['batch_16_tokens_per_second'] / full['batch_1_tokens_per_second']:.2f}",
        f"vLLM itself {theirs['batch_16_tokens_per_second'] / theirs['batch_1_tokens_per_second']:.2f}",
    ]
    for name, case in ours["cases"].items():
        if case["hit_rate"] > 0.5:
            continue
        decode, medium = case["decode"], "disk" if "disk" in name else "page cache"
        bare, moved = ours["bare_read"][medium], decode["bytes_moved"]
        yield [
            f"bandwidth used in decode, {name}",
            "at least 80 %",
            f"{moved / decode['seconds'] / bare:.0%}",
            f"of {bare / 1e9:.2f} GB/s from the {medium}; {moved / decode['exposed_wait_s'] / bare:.0%} while waiting",
        ]
    loading = ours["loading"]
    yield [
        "loading our format, of a bare copy",
        "at least 80 %",
        f"{loading['ratio']:.0%}",
        f"{loading['ours'] / 1e9:.2f} of {loading['bare_copy'] / 1e9:.2f} GB/s",
    ]
    yield ["ready after", "", f"{ours['ready_s']:.0f} s", f"vLLM {systems['vLLM']['ready_s']:.0f} s"]


def show(results: dict[str, Any]) -> None:
    """Print both tables."""
    for title, head, lines in (
        ("Budgets", HEAD, rows(results)),
        ("Aims", ["", "aim", "reached", ""], aims(results)),
    ):
        table = Table(title=title, title_justify="left")
        for position, name in enumerate(head):
            table.add_column(name, justify="right" if position else "left")
        for line in lines:
            table.add_row(*line)
        Console(width=140).print(table)


def write_readme(results: dict[str, Any], readme: Path) -> None:
    """Put all tables between the benchmark's README's markers."""
    note = f"{results['layers']} layers, {results['machine']}, one run, medians."
    tables = (markdown(HEAD, rows(results)), markdown(["", "aim", "reached", ""], aims(results)), note)
    put(readme, "results", "\n\n".join(tables))


def write_front_page(results: dict[str, Any], readme: Path) -> None:
    """Put what matters to most readers between the project's README's markers: speed and quality against bytes."""
    columns = [HEAD.index(name) for name in ("", "experts GB", "TTFT ms", "TPOT ms", "tokens/s, 16")]
    uniform = json.loads((QUALITY / "results.json").read_text())["sections"]["uniform"]
    (four_bits,) = (row for row in uniform if (row["bits"], row["quantizer"]) == (4, "rtn"))
    lines = []
    for line in rows(results):
        if "store on disk" not in line[0]:
            if line[0].startswith("vLLM"):
                line[HEAD.index("experts GB")] = (
                    f"{results['layers'] * EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2 / 1e9:.1f}"
                )
            agreement = four_bits["agreement"] if line[0].startswith("dymoe") else 1.0
            lines.append([*(line[column] for column in columns), f"{agreement:.0%}"])
    head = ["", "experts on device, GB", "TTFT ms", "TPOT ms", "batch of 16, tokens/s", "likeliest token as at 16 bits"]
    put(readme, "budget", markdown(head, lines))


def draw(results: dict[str, Any], path: Path) -> None:
    """TPOT and hit rate over the memory that experts hold."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    systems = results["systems"]
    cases = {name: case for name, case in systems["dymoe"]["cases"].items() if "disk" not in name}
    memory = [case["peak_expert_bytes"] / 1e9 for case in cases.values()]
    figure, (time_axes, hit_axes) = pyplot.subplots(2, 1, figsize=(7, 7), sharex=True, height_ratios=(2, 1))
    time_axes.plot(memory, [case["tpot_ms"] for case in cases.values()], "o-", label="vllm-dymoe, 4-bit experts")
    for name, case in cases.items():
        time_axes.annotate(name, (case["peak_expert_bytes"] / 1e9, case["tpot_ms"]), (4, 6), textcoords="offset points")
    plain = systems["vLLM"]["cases"]["all in memory"]["tpot_ms"]
    time_axes.axhline(plain, color="gray", linestyle="--", label="vLLM, bf16 experts, all in memory")
    slow = systems["accelerate"]["cases"]["layers on disk"]["tpot_ms"]
    time_axes.axhline(slow, color="firebrick", linestyle=":", label="transformers + accelerate, layers on disk")
    time_axes.set_yscale("log")
    time_axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    time_axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    time_axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    time_axes.set_ylabel("time per output token, ms")
    bottom, top = time_axes.get_ylim()
    time_axes.set_ylim(bottom, 1.3 * top)
    time_axes.legend()
    hit_axes.plot(memory, [100 * case["decode"]["hit_rate"] for case in cases.values()], "o-")
    hit_axes.set_ylabel("hits in decode, %")
    hit_axes.set_xlabel("expert memory, GB")
    for axes in (time_axes, hit_axes):
        axes.grid(alpha=0.3)
        axes.set_xlim(left=0, right=1.1 * max(memory))
    time_axes.set_title(f"{results['layers']} layers of Qwen3-30B-A3B's shape, batch 1")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
