"""What was measured, for people: tables for the README and a terminal, and a picture."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

Rows = list[list[str]]

OFFLINE_HEAD = ["", "all k", "at least one", "accuracy", "utilisation", "useful MB/token", "wasted MB/token"]
RATES_HEAD = OFFLINE_HEAD[:5]
OFFLINE_HEAD += ["us a layer", "KB", "trained in s"]
ENGINE_HEAD = ["", "TTFT ms", "TPOT ms", "request ms", "x on-demand", "of the oracle", "hits", "named right"]
ENGINE_HEAD += ["useful/late/wasted", "predicting ms/token", "of TPOT", "peak MB", "of it predictor KB"]


def offline_rows(case: dict[str, Any]) -> Rows:
    """One row for each predictor."""
    rows = []
    for name, row in case["predictors"].items():
        rows.append(
            [
                name,
                *(f"{row[key]:.1%}" for key in ("all_k", "at_least_one", "accuracy", "utilisation")),
                *(f"{row[key] / 1e6:.2f}" for key in ("useful_bytes_per_token", "wasted_bytes_per_token")),
                "" if name == "oracle" else f"{row['microseconds']:.0f}",
                f"{row['bytes'] / 1e3:.0f}" if "bytes" in row else "",
                f"{row['training_s']:.0f}" if "training_s" in row else "",
            ]
        )
    return rows


def rate_rows(case: dict[str, Any]) -> Rows:
    """Hit rates alone, one row for each predictor."""
    keys = ("all_k", "at_least_one", "accuracy", "utilisation")
    return [[name, *(f"{row[key]:.1%}" for key in keys)] for name, row in case["predictors"].items()]


def layer_rows(case: dict[str, Any]) -> Rows:
    """All-k hits by layer."""
    return [[name, *(f"{rate:.0%}" for rate in row["by_layer"])] for name, row in case["predictors"].items()]


def domain_rows(table: dict[str, dict[str, float]]) -> Rows:
    """All-k hits by the domain that was trained on and the one that was served."""
    return [[name, *(f"{rate:.1%}" for rate in row.values())] for name, row in table.items()]


def engine_rows(engine: dict[str, Any], setting: str) -> Rows:
    """One row for each variant, and one without any transfer."""
    cases = engine["cases"][setting]
    rows = []
    for name, row in [*cases.items(), ("everything resident", engine["resident"])]:
        predicted, ahead = row["predictions"], row["prefetches"]
        rows.append(
            [
                name,
                f"{row['ttft_ms']:.0f}",
                f"{row['tpot_ms']:.1f}",
                f"{row['latency_ms']:.0f}",
                f"{cases['on-demand']['latency_ms'] / row['latency_ms']:.2f}",
                f"{cases['oracle']['latency_ms'] / row['latency_ms']:.0%}",
                f"{row['hit_rate']:.0%}",
                f"{predicted['right'] / predicted['named']:.0%}" if predicted["named"] else "",
                f"{ahead['useful']:.0f}/{ahead['late']:.0f}/{ahead['wasted']:.0f}" if sum(ahead.values()) else "",
                f"{row['prediction_ms']:.2f}" if predicted["named"] else "",
                f"{row['prediction_ms'] / row['tpot_ms']:.1%}" if predicted["named"] else "",
                f"{row['peak_expert_bytes'] / 1e6:.2f}",
                f"{row['predictor_bytes'] / 1e3:.0f}" if row["predictor_bytes"] else "",
            ]
        )
    return rows


def aim_rows(results: dict[str, Any]) -> Rows:
    """Aim, what was reached, and by whom."""
    rows = []
    shipped = results["offline"]["shipped"]["predictors"]
    networks = {name: row for name, row in shipped.items() if "bytes" in row}
    others = {name: row for name, row in shipped.items() if "bytes" not in row and name != "oracle"}

    def best(found: dict[str, Any], key: str) -> tuple[str, float]:
        name = max(found, key=lambda one: found[one][key])
        return name, found[name][key]

    name, one = best(networks, "at_least_one")
    rows.append(["shipped: at least one", "above 95 %", f"{one:.1%}", name])
    (name, ours), (other, theirs) = best(networks, "all_k"), best(others, "all_k")
    rows.append(["shipped: all k, than without training", f"above {theirs:.1%} ({other})", f"{ours:.1%}", name])
    if "engine" in results:
        for setting, cases in results["engine"]["cases"].items():
            name = "duoserve" if "duoserve" in cases else "trained"
            slow, bound, ours = (cases[who]["latency_ms"] for who in ("on-demand", "oracle", name))
            aim = f"1.4; oracle {slow / bound:.2f}"
            rows.append([f"{name}, {setting}: times as fast as on demand", aim, f"{slow / ours:.2f}", ""])
            share = cases[name]["prediction_ms"] / cases[name]["tpot_ms"]
            rows.append([f"{name}, {setting}: predicting, of TPOT", "below 3 %", f"{share:.1%}", ""])
    return rows


def tables(results: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows]]:
    """Title, head and rows of each."""
    if "offline" in results:
        yield "Aims", ["", "aim", "reached", "by"], aim_rows(results)
        for name, case in results["offline"].items():
            title = f"{name}: {case['tokens']} tokens of held-out requests"
            yield title, OFFLINE_HEAD, offline_rows(case)
        shipped = results["offline"]["shipped"]
        layers = len(next(iter(shipped["predictors"].values()))["by_layer"])
        yield "shipped: all k, by layer", ["", *(str(layer) for layer in range(1, layers + 1))], layer_rows(shipped)
    for name, case in results.get("random", {}).items():
        yield f"{name} with random weights: {case['tokens']} tokens of held-out requests", RATES_HEAD, rate_rows(case)
    if "across_domains" in results:
        names = list(next(iter(results["across_domains"].values())))
        title = "shipped: all k; rows are trained on, columns served"
        yield title, ["", *names], domain_rows(results["across_domains"])
    if "engine" in results:
        engine = results["engine"]
        for setting in engine["cases"]:
            title = f"Real engine, {setting}, {engine['link']} emulated: {engine['requests']} requests of "
            yield f"{title}{engine['new_tokens']} tokens", ENGINE_HEAD, engine_rows(engine, setting)


def show(results: dict[str, Any]) -> None:
    """Print every table."""
    for title, head, rows in tables(results):
        table = Table(title=title, title_justify="left")
        for position, name in enumerate(head):
            table.add_column(name, justify="right" if position else "left")
        for row in rows:
            table.add_row(*row)
        Console(width=200).print(table)


def write_readme(results: dict[str, Any], readme: Path) -> None:
    """Put the tables between the README's markers."""
    parts = [f"**{title}**\n\n{markdown(columns, rows)}" for title, columns, rows in tables(results)]
    put(readme, "results", "\n\n".join([*parts, f"On one {results['machine']}."]))


def draw(results: dict[str, Any], path: Path) -> None:
    """Accuracy against microseconds, and the distribution of decode throughput (the paper's Figure 6)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    offline, engine = results.get("offline", {}), results.get("engine", {"cases": {}})
    columns = max(len(offline), len(engine["cases"]))
    figure, all_axes = pyplot.subplots(2, columns, figsize=(4.2 * columns, 8), squeeze=False)
    for axes in [*all_axes[0][len(offline) :], *all_axes[1][len(engine["cases"]) :]]:
        axes.set_visible(False)
    for axes, (name, case) in zip(all_axes[0], offline.items(), strict=False):
        for label, row in case["predictors"].items():
            if label != "oracle":
                at = (row["microseconds"], row["accuracy"])
                axes.scatter(*at, color="firebrick" if "bytes" in row else "steelblue")
                axes.annotate(label, at, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axes.set(title=name, xlabel="microseconds a layer", ylabel="share of wanted experts that were named")
        axes.set(xscale="log", ylim=(0, 1))
        axes.margins(x=0.25)  # for the names
    names = [*dict.fromkeys(name for cases in engine["cases"].values() for name in cases), "everything resident"]
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for axes, (setting, cases) in zip(all_axes[1], engine["cases"].items(), strict=False):
        for label, row in [*cases.items(), ("everything resident", engine["resident"])]:
            rates = row["tokens_per_second"]
            shares = [(i + 1) / len(rates) for i in range(len(rates))]
            axes.plot(rates, shares, label=label, linewidth=1.2, color=colours[label])
        axes.set(title=f"decode, {setting}", xlabel="tokens per second", ylabel="share of tokens")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
