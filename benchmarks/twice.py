"""Every row measured in two runs, and the faster one kept: whoever shares a machine can only make it slower."""

from collections.abc import Callable
from pathlib import Path

from vllm_dymoe.bench.rows import Row, append_row, is_full_load, read_rows
from vllm_dymoe.bench.run import ROWS


def twice(bench: Callable[[Path], None], out: Path, *, same_link: bool = False) -> None:
    """Run ``vllm-dymoe bench`` twice, and once more over the faster rows, for its table; they say what both runs took.

    Args:
        bench: runs it into a folder; rows that the folder has are not measured again.
        out: for the faster rows; the runs lie inside.
        same_link: measure the full load in the first run alone: from it follows the rate of an emulated link.
    """
    first, again = out / "first", out / "again"
    for folder in (first, again):
        folder.mkdir(parents=True, exist_ok=True)
    bench(first)
    known = {row["key"] for row in read_rows(again / ROWS)}
    for row in read_rows(first / ROWS):
        if row["key"] not in known and (row["kind"] == "machine" or (same_link and is_full_load(row))):
            append_row(again / ROWS, row)
    bench(again)
    (out / ROWS).unlink(missing_ok=True)
    others = {row["key"]: row for row in read_rows(again / ROWS)}
    for row in read_rows(first / ROWS):
        other = others[row["key"]]
        faster = min(row, other, key=_tpot)
        if row["kind"] == "speed":
            faster["measured"]["tpot_ms"]["runs"] = [_tpot(row), _tpot(other)]
        append_row(out / ROWS, faster)
    bench(out)


def _tpot(row: Row) -> float:
    return float(row["measured"]["tpot_ms"]["mean"]) if row["kind"] == "speed" else 0.0
