"""What was measured, for people: bounds beside measurements, aims beside what was reached, and a picture."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware import LINKS, Shape, decode_layer_seconds, ratio
from rich.console import Console
from rich.table import Table
from variants import CACHE, VARIANTS

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

# 4-bit experts in groups of 64; serve.py measures the same.
QWEN3_30B = {
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "top_k": 8,
    "expert_bytes": 2_654_208,
}
HEAD = ["", "TTFT ms", "of bound", "TPOT ms", "of bound", "x on-demand", "x cache", "hits", "MB/token", "ahead"]
HEAD += ["wait ms", "link used", "accuracy", "utilisation", "useful/late/wasted", "peak MB"]


def cells(results: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, Any]]]:
    """Model, link, budget, what is common to them, and the variants."""
    for name, model in results["models"].items():
        for link, data in model["links"].items():
            for budget, cases in data["cases"].items():
                yield name, link, budget, {**model["resident"], "gbps": data["gbps"], "ratio": data["ratio"]}, cases


def decode_bound(common: dict[str, Any], cases: dict[str, Any]) -> float:
    """Milliseconds of a token in which the cache's transfers and the computation overlap entirely."""
    return max(common["tpot_ms"], cases[CACHE]["bytes_per_token"]["demand"] / common["gbps"] / 1e6)


def prefill_bound(common: dict[str, Any], case: dict[str, Any]) -> float:
    """Milliseconds of a prefill in which its transfers and the computation overlap but for one expert."""
    return max(common["ttft_ms"], case["prefill_link_ms"]) + common["shape"]["expert_bytes"] / common["gbps"] / 1e6


def fetches_ahead(case: dict[str, Any]) -> bool:
    """Whether anybody was asked for a prediction."""
    return bool(case["predictions"]["wanted"])


def over_cache(case: dict[str, Any], cases: dict[str, Any]) -> float:
    """How many times as fast as the cache alone, in the same engine where that was measured."""
    return float(case.get("without", cases[CACHE])["tpot_ms"] / case["tpot_ms"])


def rows(common: dict[str, Any], cases: dict[str, Any]) -> Iterator[list[str]]:
    """One row for each variant."""
    bound = decode_bound(common, cases)
    for name, case in cases.items():
        predicted, ahead = case["predictions"], case["prefetches"]
        moved = case["bytes_per_token"]
        yield [
            name,
            f"{case['ttft_ms']:.0f}",
            f"{prefill_bound(common, case) / case['ttft_ms']:.0%}",
            f"{case['tpot_ms']:.1f}",
            f"{bound / case['tpot_ms']:.0%}",
            f"{cases['on-demand']['tpot_ms'] / case['tpot_ms']:.2f}" if "on-demand" in cases else "",
            f"{over_cache(case, cases):.2f}",
            f"{case['hit_rate']:.0%}",
            f"{sum(moved.values()) / 1e6:.2f}",
            f"{moved['prefetch'] / max(1, sum(moved.values())):.0%}",
            f"{case['exposed_wait_ms']:.1f}",
            f"{case['link_utilisation']:.0%}",
            f"{predicted['right'] / predicted['wanted']:.0%}" if predicted["wanted"] else "",
            f"{predicted['right'] / predicted['named']:.0%}" if predicted["named"] else "",
            f"{ahead['useful']:.0f}/{ahead['late']:.0f}/{ahead['wasted']:.0f}" if sum(ahead.values()) else "",
            f"{case['peak_expert_bytes'] / 1e6:.1f}",
        ]


def ratios(results: dict[str, Any]) -> Iterator[list[str]]:
    """What the links are set to, from the data sheet of the papers' machine."""
    for name, model in results["models"].items():
        resident = model["resident"]
        shape = Shape(**(resident["shape"] if name == "synthetic" else QWEN3_30B))
        for link, data in model["links"].items():
            assert abs(data["ratio"] / ratio(shape, link) - 1) < 0.01, "hardware.py is not what the run was set to"
            yield [
                f"{name}, {link}",
                f"{1e6 * decode_layer_seconds(shape):.0f} us",
                f"{1e6 * shape.expert_bytes / LINKS[link]:.0f} us",
                f"{data['ratio']:.2f}",
                f"{resident['layer_ms']:.2f} ms",
                f"{resident['shape']['expert_bytes'] / data['gbps'] / 1e6:.2f} ms",
                f"{1e3 * data['gbps']:.1f} MB/s",
            ]


RATIO_HEAD = ["", "3090: layer", "3090: expert", "ratio", "here: layer", "here: expert", "emulated rate"]


def aims(results: dict[str, Any]) -> Iterator[list[str]]:
    """Aim, what was reached, and where."""

    def worst(found: list[tuple[float, str]], text: str = "{:.2f}") -> list[str]:
        value, where = min(found) if found else (0.0, "nowhere")
        return [text.format(value) if found else "", where]

    everything = [
        (f"{model}, {link}, {budget}, {variant}", variant, common, cases, case)
        for model, link, budget, common, cases in cells(results)
        for variant, case in cases.items()
    ]
    for what, chosen in (("with next-gate", "next-gate"), ("without prefetch", CACHE)):
        prefill = [
            (prefill_bound(common, case) / case["ttft_ms"], where)
            for where, variant, common, _, case in everything
            if variant == chosen
        ]
        yield [f"prefill: of max(link, computing) and one expert, {what}", "at least 0.91", *worst(prefill)]
    for what, aim, some in (
        ("the slowest of all", "at least 1", set(VARIANTS) - {"on-demand"}),
        ("the slowest with next-gate", "at least 1.3", {"next-gate"}),
    ):
        found = [
            (cases["on-demand"]["tpot_ms"] / case["tpot_ms"], where)
            for where, variant, _, cases, case in everything
            if variant in some
        ]
        yield [f"decode: times as fast as on demand, {what}", aim, *worst(found)]
    ahead_of_cache = [
        (over_cache(case, cases), where)
        for where, variant, _, cases, case in everything
        if fetches_ahead(case) and VARIANTS[variant].exact and not VARIANTS[variant].whole
    ]
    what = "decode: times as fast as the cache alone, the slowest that fetches ahead"
    yield [what, "at least 1", *worst(ahead_of_cache)]
    for model, link, budget, common, cases in cells(results):
        possible = cases[CACHE]["tpot_ms"] / decode_bound(common, cases)
        if possible < 1.3:
            continue
        rows_ahead = [name for name in cases if VARIANTS[name].exact and not VARIANTS[name].oracle]
        ahead = {name: cases[name] for name in rows_ahead if fetches_ahead(cases[name])}
        if not ahead:
            continue
        best = max(ahead, key=lambda name: over_cache(ahead[name], cases))
        yield [
            f"decode: times as fast as the cache alone, {model}, {link}, {budget}; {possible:.2f} would be the bound",
            "more than 1",
            f"{over_cache(ahead[best], cases):.2f}",
            f"{best}; the oracle "
            + ", ".join(f"{over_cache(cases[name], cases):.2f}" for name in cases if name == "oracle"),
        ]
    for whole, part in (
        ("half wrong, whole", "half wrong"),
        ("half wrong, whole", "half wrong, n = 1"),
        ("next-gate", "next-gate, n = 1"),
    ):
        found = [
            (cases[whole]["tpot_ms"] / cases[part]["tpot_ms"], f"{model}, {link}, {budget}")
            for model, link, budget, _, cases in cells(results)
            if whole in cases and part in cases
        ]
        if found:
            yield [f"sub-experts: {part}, over {whole}, the best", "at least 1.2", *worst([max(found)])]


def show(results: dict[str, Any]) -> None:
    """Print every table."""
    tables = [("The emulated links", RATIO_HEAD, ratios(results))]
    for model, link, budget, common, cases in cells(results):
        tables.append((_title(model, link, budget, common, cases), HEAD, rows(common, cases)))
    if all("on-demand" in cases for *_, cases in cells(results)):
        tables.append(("Aims", ["", "aim", "reached", "where"], aims(results)))
    for title, head, lines in tables:
        table = Table(title=title, title_justify="left")
        for position, name in enumerate(head):
            table.add_column(name, justify="right" if position else "left")
        for line in lines:
            table.add_row(*line)
        Console(width=200).print(table)


def _title(model: str, link: str, budget: str, common: dict[str, Any], cases: dict[str, Any]) -> str:
    link_ms = cases[CACHE]["bytes_per_token"]["demand"] / common["gbps"] / 1e6
    return (
        f"{model}, {link}, {budget} of the experts: a token computes {common['tpot_ms']:.1f} ms, its cache misses "
        f"travel {link_ms:.1f} ms; bound {decode_bound(common, cases):.1f} ms"
    )


def write_readme(results: dict[str, Any], readme: Path) -> None:
    """Put the tables between the README's markers."""
    parts = [markdown(["aim", "is", "reached", "where"], aims(results)), markdown(RATIO_HEAD, ratios(results))]
    for model, link, budget, common, cases in cells(results):
        parts += [f"**{_title(model, link, budget, common, cases)}**", markdown(HEAD, rows(common, cases))]
    parts.append(markdown(["variant", "is"], ([name, variant.rows] for name, variant in VARIANTS.items())))
    parts.append(f"One run, {results['machine']}.")
    put(readme, "results", "\n\n".join(parts))


def draw(results: dict[str, Any], path: Path) -> None:
    """TPOT of every variant in every cell, over the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = list(cells(results))
    figure, all_axes = pyplot.subplots(1, len(found), figsize=(2.6 * len(found), 5), sharey=True)
    names = list(VARIANTS)
    for axes, (model, link, budget, common, cases) in zip(all_axes, found, strict=True):
        there = [name for name in names if name in cases]
        places = [len(names) - names.index(name) for name in there]
        axes.barh(places, [cases[name]["tpot_ms"] for name in there], color="steelblue")
        axes.barh(places, [common["tpot_ms"]] * len(there), color="lightsteelblue", height=0.3)
        axes.axvline(decode_bound(common, cases), color="firebrick", linestyle="--")
        axes.set_title(f"{model}\n{link}, {budget}", fontsize=9)
        axes.set_xlabel("ms per token")
        axes.set_yticks([len(names) - i for i in range(len(names))], names)
    figure.suptitle("Time per output token; narrow: computing alone; dashed: transfers hidden entirely", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
