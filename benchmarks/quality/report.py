"""What was measured, for people: tables, aims beside what was reached, and a picture."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

from vllm_dymoe.quantize.gptq import LOW_WEIGHT

Row = dict[str, Any]
NESTED = ", nested"
LOST = ["perplexity", "loss", "agreement", "KL, millinats"]


def lost(row: Row) -> list[str]:
    """The four cells that every table has: how far a row is from 16 bits."""
    return [
        f"{row['perplexity']:.3f}",
        f"{row['loss']:+.2%} ± {row['loss_error']:.2%}",
        f"{row['agreement']:.1%}",
        f"{1000 * row['kl_nats']:.2f} ± {1000 * row['kl_error']:.2f}",
    ]


def hits(row: Row) -> str:
    """Of experts that were needed, the share that was there; rows of an earlier version do not say."""
    return f"{row['hit_rate']:.1%}" if "hit_rate" in row else "-"


def find(rows: list[Row], **wanted: Any) -> Row | None:
    """The first row with these values, if there is one."""
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def uniform(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Every expert at one width."""
    return ["bits", "quantizer", *LOST], ([str(row["bits"]), row["quantizer"], *lost(row)] for row in rows)


def tiers(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Both phases side by side, with the bytes of what was computed."""

    def lines() -> Iterator[list[str]]:
        for prompt in rows:
            if prompt["phase"] != "prompt":
                continue
            keys = ("experts", "quantizer", "skipped_weights")
            decode = find(rows, phase="decode", **{key: prompt[key] for key in keys})
            cells = [prompt["experts"], prompt["quantizer"], prompt["skipped_weights"]]
            for row in (prompt, decode):
                uniform_4 = find(rows, phase=row["phase"], experts="4") if row else None
                if row is None or uniform_4 is None:
                    cells += [""] * 4
                    continue
                share = row["planned_bytes_per_step"] / uniform_4["planned_bytes_per_step"]
                cells += [*lost(row)[1:], f"{share:.0%}"]
            yield cells

    head = [f"{phase}: {name}" for phase in ("prompt", "decode") for name in (*LOST[1:], "bytes of uniform 4")]
    return ["experts", "quantizer", "skipped weights", *head], lines()


def choices(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Who is chosen, and in which layers."""
    names = {(True, True): "importance, by depth", (True, False): "importance, equal"}
    names |= {(False, True): "random, by depth", (False, False): "random, equal"}

    def lines() -> Iterator[list[str]]:
        for row in rows:
            name = names[row["by_importance"], row["by_depth"]]
            kib = f"{row['planned_bytes_per_step'] / 1024:.0f}"
            yield [f"4/{row['lo']}", f"{row['retention']:g}", row["phase"], name, *lost(row), kib]

    return ["tiers", "r", "phase", "high are", *LOST, "KiB a step"], lines()


def layers(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """One layer at 2 bits."""
    return ["layer at 2 bits", "quantizer", *LOST], ([str(row["layer"]), row["quantizer"], *lost(row)] for row in rows)


def tokens(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Which tokens count."""
    return ["tokens that count", "tiers", *LOST], ([row["tokens"], f"4/{row['lo']}", *lost(row)] for row in rows)


def budgets(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Bytes moved under the same budget."""

    def lines() -> Iterator[list[str]]:
        for row in rows:
            four = find(rows, budget=row["budget"], experts="4", quantizer="rtn")
            moved = row["moved_bytes_per_token"]
            share = f"{moved / four['moved_bytes_per_token']:.0%}" if four else ""
            place = [f"{row['budget']:.0%}", row["experts"], row["quantizer"]]
            yield [*place, hits(row), f"{moved / 1024:.0f}", share, *lost(row)]

    head = ["budget, of all experts at 4 bits", "experts", "quantizer", "hits", "KiB moved a token", "of uniform 4"]
    return [*head, *LOST], lines()


def both(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """The two readings of the same codes."""
    return ["bits, nested", "quantizer", *LOST], ([str(row["bits"]), row["quantizer"], *lost(row)] for row in rows)


def sizes(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Bytes of an expert."""

    def lines() -> Iterator[list[str]]:
        for row in rows:
            promotion = row["promotion_bytes"]
            whole = row["expert_bytes"]
            name = "/".join(map(str, row["stored_bits"]))
            yield [name, f"{whole}", f"{promotion} ({promotion / whole:.0%})" if promotion else ""]

    return ["stored bits", "bytes of an expert", "bytes of a promotion"], lines()


TABLES = {
    "uniform": uniform,
    "both": both,
    "sizes": sizes,
    "tiers": tiers,
    "choices": choices,
    "layers": layers,
    "tokens": tokens,
    "budgets": budgets,
}


def _nested_aims(sections: dict[str, list[Row]]) -> Iterator[list[str]]:
    """What a low version inside the high one is for."""
    for row in sections.get("budgets", []):
        name = row["experts"].removesuffix(NESTED)
        if row["quantizer"] == "rtn" and name != row["experts"] and name.startswith("4/2, r = 0.75"):
            four, before = (
                find(sections["budgets"], budget=row["budget"], experts=other, quantizer="rtn") for other in ("4", name)
            )
            if four and before:
                yield [
                    f"bytes moved by {row['experts']} at {row['budget']:.0%}, of uniform 4's",
                    "at most 65 %, at equal or better loss, with more hits",
                    f"{row['moved_bytes_per_token'] / four['moved_bytes_per_token']:.0%}",
                    f"KL {1000 * row['kl_nats']:.2f}, uniform 4 {1000 * four['kl_nats']:.2f}; "
                    f"hits {hits(row)}, uniform 4 {hits(four)}; two versions beside each other "
                    f"{before['moved_bytes_per_token'] / four['moved_bytes_per_token']:.0%}",
                ]
    if "sizes" in sections:
        four, _, nested = sections["sizes"]
        yield [
            "store of 4/2, of 4 bits'",
            "100 %",
            f"{nested['expert_bytes'] / four['expert_bytes']:.0%}",
            f"{nested['expert_bytes']} bytes an expert",
        ]
        share = nested["promotion_bytes"] / nested["expert_bytes"]
        yield ["a promotion, of a high expert", "at most 45 %", f"{share:.0%}", f"{nested['promotion_bytes']} bytes"]
    if "both" in sections and "uniform" in sections:
        for quantizer, ours, most in (("rtn", "rtn", 1.0), ("gptq", f"gptq {LOW_WEIGHT:g}", 1.25)):
            inside = find(sections["both"], bits=2, quantizer=ours)
            alone = find(sections["uniform"], bits=2, quantizer=quantizer)
            if inside and alone:
                yield [
                    f"KL of nested 2 bits, {quantizer}, of 2 bits alone",
                    f"below {most:.0%}",
                    f"{inside['kl_nats'] / alone['kl_nats']:.0%}",
                    f"{1000 * inside['kl_nats']:.2f} of {1000 * alone['kl_nats']:.2f}",
                ]
        aware, blind = (find(sections["both"], bits=4, quantizer=f"gptq {weight:g}") for weight in (LOW_WEIGHT, 0))
        if aware and blind:
            yield [
                "KL of 4 bits, GPTQ for both readings, of GPTQ for one",
                "at most 110 %",
                f"{aware['kl_nats'] / blind['kl_nats']:.0%}",
                f"{1000 * aware['kl_nats']:.2f} of {1000 * blind['kl_nats']:.2f}",
            ]


def aims(results: Row) -> Iterator[list[str]]:
    """Aim, what was reached, and what it is made of."""
    sections = results["sections"]
    if "tiers" in sections:
        rows = sections["tiers"]
        for phase in ("prompt", "decode"):
            for name in ("4/2, r = 0.75", "4/2, r = 0.75, nearest"):
                ours = find(rows, experts=name, phase=phase, quantizer="rtn")
                low = find(rows, experts="2", phase=phase)
                if ours and low:
                    yield [
                        f"loss of {name}, {phase}, of uniform 2's",
                        "below 25 %",
                        f"{ours['loss'] / low['loss']:.0%}",
                        f"{ours['loss']:+.2%} of {low['loss']:+.2%}; in KL {ours['kl_nats'] / low['kl_nats']:.0%}",
                    ]
    yield from _nested_aims(sections)
    two = {row["quantizer"]: row for row in sections.get("uniform", []) if row["bits"] == 2}
    if "rtn" in two:
        for name in ("hqq", "gptq"):
            if name in two:
                ours, theirs = two[name], two["rtn"]
                yield [
                    f"loss of {name} at 2 bits, of rtn's",
                    "at most 50 %" if name == "gptq" else "",
                    f"{ours['loss'] / theirs['loss']:.0%}",
                    f"{ours['loss']:+.2%} of {theirs['loss']:+.2%}; in KL {ours['kl_nats'] / theirs['kl_nats']:.0%}",
                ]


AIMS_HEAD = ["", "aim", "reached", ""]


def show(results: Row) -> None:
    """Print everything."""
    tables = [(name, *TABLES[name](rows)) for name, rows in results["sections"].items()]
    for title, head, lines in (*tables, ("aims", AIMS_HEAD, aims(results))):
        table = Table(title=title, title_justify="left")
        for position, name in enumerate(head):
            table.add_column(name, justify="right" if position else "left")
        for line in lines:
            table.add_row(*line)
        Console(width=200).print(table)


def write_readme(results: Row, readme: Path) -> None:
    """Put every table between its markers in the README."""
    for name, rows in results["sections"].items():
        put(readme, name, markdown(*TABLES[name](rows)))
    note = (
        f"{results['tokens']['prompt']} tokens as prompts, {results['tokens']['decode']} decoded, "
        f"{sum(results['seconds'].values()) / 60:.0f} minutes in all, {results['machine']}."
    )
    put(readme, "aims", markdown(AIMS_HEAD, aims(results)) + "\n\n" + note)


def draw(results: Row, path: Path) -> None:
    """Quality against bytes moved, choices against retention, and one layer at a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = results["sections"]
    figure, (moved, chosen, depth) = pyplot.subplots(1, 3, figsize=(17, 5))
    names = dict.fromkeys((row["experts"], row["quantizer"]) for row in sections["budgets"])
    for at, (name, quantizer) in enumerate(names):
        rows = [row for row in sections["budgets"] if (row["experts"], row["quantizer"]) == (name, quantizer)]
        x, y = [row["moved_bytes_per_token"] / 1024 for row in rows], [1000 * row["kl_nats"] for row in rows]
        label = (name if "/" in name else f"{name} everywhere") + f" ({quantizer})"
        beside = name + NESTED in {other for other, _ in names}  # two versions, as before one lay inside the other
        style = "x--" if beside else "s-" if quantizer == "gptq" else "o-"
        moved.plot(x, y, style, color=f"C{at}", markersize=4, label=label + (", before" if beside else ""))
    moved.set_xscale("log")
    moved.set_xlabel("KiB of experts moved for each decoded token")
    moved.set_title("budgets of 75 %, 50 % and 25 % (left to right) of all experts at 4 bits")
    for (by_importance, by_depth), style in {
        (True, True): "o-",
        (True, False): "o--",
        (False, True): "x-",
        (False, False): "x--",
    }.items():
        for lo, colour in ((2, "C0"), (0, "C3")):
            rows = [
                row
                for row in sections["choices"]
                if (row["by_importance"], row["by_depth"], row["lo"], row["phase"])
                == (by_importance, by_depth, lo, "prompt")
            ]
            label = f"4/{lo}, {'importance' if by_importance else 'random'}, {'by depth' if by_depth else 'equal'}"
            x, y = [row["retention"] for row in rows], [1000 * row["kl_nats"] for row in rows]
            chosen.plot(x, y, style, color=colour, label=label)
    chosen.set_xlabel("average retention r")
    chosen.set_title("which experts stay high, prompts")
    for at, quantizer in enumerate(dict.fromkeys(row["quantizer"] for row in sections["layers"])):
        rows = [row for row in sections["layers"] if row["quantizer"] == quantizer]
        x, y = [row["layer"] for row in rows], [1000 * row["kl_nats"] for row in rows]
        depth.plot(x, y, "o-", color=f"C{at}", label=quantizer)
    depth.set_xlabel("layer whose experts have 2 bits, the others 16")
    depth.set_title("one layer at a time")
    for axes in (moved, chosen, depth):
        axes.set_ylabel("KL divergence from 16 bits, millinats")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=7, framealpha=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
