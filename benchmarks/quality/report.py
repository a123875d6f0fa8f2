"""Tables of the measurements."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

from vllm_dymoe.cli.figures import Panel

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
LOST = ["perplexity", "loss", "agreement", "KL, millinats"]


def lost(row: Row) -> list[str]:
    """Return the four cells of every table: how far a row is from 16 bits."""
    return [
        f"{row['perplexity']:.3f}",
        f"{row['loss']:+.2%} ± {row['loss_error']:.2%}",
        f"{row['agreement']:.1%}",
        f"{1000 * row['kl_nats']:.2f} ± {1000 * row['kl_error']:.2f}",
    ]


def number(value: float | None, digits: int) -> str:
    """Return a cell of a table, empty for what was not measured."""
    return "" if value is None else f"{value:.{digits}f}"


def find(rows: list[Row], **wanted: Any) -> Row | None:
    """Return the first row with these values, if there is one."""
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def uniform(rows: list[Row]) -> Table:
    """Return the table of every expert at one width."""
    return ["bits", "quantizer", *LOST], [[str(row["bits"]), row["quantizer"], *lost(row)] for row in rows]


def readings(rows: list[Row]) -> Table:
    """Return the table of every expert in one reading of a nested version."""
    lines = [[row["reading"], row["quantizer"], f"{row['bits_per_weight']:.2f}", *lost(row)] for row in rows]
    return ["reading", "quantizer", "bits for each weight", *LOST], lines


def precisions(rows: list[Row]) -> Table:
    """Return the table of both phases side by side.

    It has the bytes of the computed experts.
    """

    def cells(row: Row | None) -> list[str]:
        uniform_4 = find(rows, phase=row["phase"], experts="4") if row else None
        if row is None or uniform_4 is None:
            return [""] * 4
        return [*lost(row)[1:], f"{row['planned_bytes_per_step'] / uniform_4['planned_bytes_per_step']:.0%}"]

    lines = []
    for prompt in (row for row in rows if row["phase"] == "prompt"):
        place = {key: prompt[key] for key in ("experts", "quantizer", "skipped_weights")}
        lines.append([*place.values(), *cells(prompt), *cells(find(rows, phase="decode", **place))])
    head = [f"{phase}: {name}" for phase in ("prompt", "decode") for name in (*LOST[1:], "bytes of uniform 4")]
    return ["experts", "quantizer", "skipped weights", *head], lines


def budgets(rows: list[Row]) -> Table:
    """Return the table of bytes moved under the same budget."""
    lines = []
    for row in rows:
        four = find(rows, budget=row["budget"], experts="4", quantizer="rtn")
        moved = row["moved_bytes_per_token"]
        share = f"{moved / four['moved_bytes_per_token']:.0%}" if four else ""
        place = [f"{row['budget']:.0%}", row["experts"], row["quantizer"]]
        lines.append([*place, f"{row['hit_rate']:.1%}", f"{moved / 1024:.0f}", share, *lost(row)])
    head = ["budget, of all experts at 4 bits", "experts", "quantizer", "hits", "KiB moved a token", "of uniform 4"]
    return [*head, *LOST], lines


def shifts(rows: list[Row]) -> Table:
    """Return the table of KL in each domain, and how far dynaexq is from the oracle."""
    lines = []
    for oracle in (row for row in rows if row["experts"] == "oracle"):
        place = {"high": oracle["high"], "domain": oracle["domain"]}
        found = [find(rows, experts=name, **place) for name in ("oracle", "dynaexq", "as before")]
        kl = [1000 * row["kl_nats"] if row else float("nan") for row in found]
        cells = [f"{value:.2f}" for value in kl]
        lines.append([f"{oracle['high']:.1%}", oracle["domain"], *cells, f"{kl[1] / kl[0] - 1:+.0%}"])
    head = ["experts that are high", "traffic shifts to", "oracle", "dynaexq", "the set of before"]
    return [*head, "dynaexq, beside the oracle"], lines


def sets(rows: list[Row]) -> Table:
    """Return the table of KL in each domain, and their mean."""
    lines = []
    for row in rows:
        kl = [f"{1000 * kl:.2f}" for kl in (*row["by_domain"].values(), row["kl_nats"])]
        lines.append([f"{row['high']:.0%}", row["quantizer"], f"{row['bits_per_weight']:.2f}", *kl])
    return ["experts that are high", "quantizer", "bits for each weight", *rows[0]["by_domain"], "mean"], lines


def panels(rows: list[Row]) -> list[Panel]:
    """Return charts of KL by bytes moved, one for each budget.

    Each has a line for each quantizer of nested 4/2.
    """
    found: dict[float, Panel] = {}
    for row in rows:
        share = row["budget"]
        title = f"{share:.0%} of the experts at 4 bits"
        panel = found.setdefault(share, Panel(title, "KiB moved for each token", "KL to 16 bits, millinats"))
        if row["experts"] == "4":
            label = f"4 bits, {row['quantizer']}"
        elif "nested" in row["experts"] and "Eq. 4" not in row["experts"]:
            label = f"4/2, {row['quantizer']}"
        else:
            continue
        point = row["moved_bytes_per_token"] / 1024, 1000 * row["kl_nats"]
        panel.lines.setdefault(label, []).append(point)
    return list(found.values())


def papers(rows: list[Row]) -> Table:
    """Return the table of the papers' own policies."""
    lines = [[row["experts"], row["quantizer"], row["phase"], *lost(row)] for row in rows]
    return ["experts", "quantizer", "phase", *LOST], lines


def pruning(rows: list[Row]) -> Table:
    """Return the table of prompts in which experts are skipped."""
    lines = [[f"{row['retention']:g}", row["kept"], row["layers"], *lost(row)] for row in rows]
    return ["retention", "which are kept", "layers", *LOST], lines


def sensitivity(rows: list[Row]) -> Table:
    """Return the table of single layers at 2 bits."""
    return ["layer at 2 bits", "phase", *LOST], [[str(row["layer"]), row["phase"], *lost(row)] for row in rows]


def rescues(rows: list[Row]) -> Table:
    """Return the table of KL and fetches of ``adaptive``.

    It is compared with fetching every missing residual slice.
    """
    lines = []
    for row in rows:
        place = {key: row[key] for key in ("residuals", "quantizer", "phase")}
        four, fetched = find(rows, experts="uniform 4", **place), row["fetched_per_token"]
        share = f"{fetched / four['fetched_per_token']:.0%}" if four and row is not four else ""
        moved = [number(fetched, 2), number(row["kib_per_token"], 1), share]
        lines.append([f"{row['residuals']:.0%}", row["experts"], row["quantizer"], row["phase"], lost(row)[-1], *moved])
    head = ["residual slices", "experts", "quantizer", "phase", "KL, millinats", "slices a token", "KiB a token"]
    return [*head, "slices, of uniform 4"], lines


def tables(results: Row) -> dict[str, str]:
    """Return each section's table, in Markdown."""
    of = (uniform, readings, precisions, budgets, sets, shifts, papers, pruning, sensitivity, rescues)
    made = {make.__name__: make for make in of}
    return {name: markdown(*made[name](rows)) for name, rows in results["sections"].items()}


def write_readme(results: Row, readme: Path) -> None:
    """Put every table between its markers in the README."""
    note = (
        f"{results['tokens']['prompt']} tokens as prompts, {results['tokens']['decode']} decoded, "
        f"{sum(results['seconds'].values()) / 60:.0f} minutes in all, {results['machine']}."
    )
    for name, text in {**tables(results), "run": note}.items():
        put(readme, name, text)
