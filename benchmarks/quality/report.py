"""Tables of what was measured."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

Row = dict[str, Any]
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


def readings(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """Every expert in one reading of a nested version."""
    lines = ([row["reading"], row["quantizer"], f"{row['bits_per_weight']:.2f}", *lost(row)] for row in rows)
    return ["reading", "quantizer", "bits for each weight", *LOST], lines


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


def shifts(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """KL of each domain, and how far dynaexq is from the oracle."""

    def lines() -> Iterator[list[str]]:
        for oracle in rows:
            if oracle["experts"] != "oracle":
                continue
            place = {"high": oracle["high"], "domain": oracle["domain"]}
            found = [find(rows, experts=name, **place) for name in ("oracle", "dynaexq", "as before")]
            kl = [1000 * row["kl_nats"] if row else float("nan") for row in found]
            cells = [f"{value:.2f}" for value in kl]
            yield [f"{oracle['high']:.1%}", oracle["domain"], *cells, f"{kl[1] / kl[0] - 1:+.0%}"]

    head = ["experts that are high", "traffic shifts to", "oracle", "dynaexq", "the set of before"]
    return [*head, "dynaexq, beside the oracle"], lines()


def sets(rows: list[Row]) -> tuple[list[str], Iterator[list[str]]]:
    """KL of each domain, and their mean."""

    def lines() -> Iterator[list[str]]:
        for row in rows:
            domains = [f"{1000 * kl:.2f}" for kl in row["by_domain"].values()]
            place = [f"{row['high']:.0%}", row["quantizer"], f"{row['bits_per_weight']:.2f}"]
            yield [*place, *domains, f"{1000 * row['kl_nats']:.2f}"]

    return ["experts that are high", "quantizer", "bits for each weight", *rows[0]["by_domain"], "mean"], lines()


TABLES = {"uniform": uniform, "readings": readings, "tiers": tiers, "budgets": budgets, "sets": sets, "shifts": shifts}


def show(results: Row) -> None:
    """Print everything."""
    for name, rows in results["sections"].items():
        print(f"\n{name}\n\n{markdown(*TABLES[name](rows))}")


def write_readme(results: Row, readme: Path) -> None:
    """Put every table between its markers in the README."""
    for name, rows in results["sections"].items():
        put(readme, name, markdown(*TABLES[name](rows)))
    note = (
        f"{results['tokens']['prompt']} tokens as prompts, {results['tokens']['decode']} decoded, "
        f"{sum(results['seconds'].values()) / 60:.0f} minutes in all, {results['machine']}."
    )
    put(readme, "run", note)
