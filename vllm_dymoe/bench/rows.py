"""Rows on disk: JSON lines, each complete or missing.

So a killed run resumes with the next row.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dymoe.durable import append_line
from vllm_dymoe.options import ConfigError

ROWS = "rows.jsonl"
Row = dict[str, Any]


class OutputsDifferError(ConfigError):
    """Two rows of one fixed precision gave different tokens.

    This is a bug of ours, or a fault of the machine.
    """


def read_rows(path: Path) -> list[Row]:
    """Return complete rows, the later of two with the same key.

    Raises:
        ConfigError: a line before the last is invalid.
    """
    lines = path.read_text().split("\n") if path.exists() else []
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            rows[row["key"]] = row
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}, line {number}, is not a row of a benchmark; name another folder.") from error
    return list(rows.values())


def append_row(path: Path, row: Row) -> None:
    """Add one row, in one write; an incomplete last row of a killed run is cut off."""
    append_line(path, json.dumps(row).encode())


def is_full_load(row: Row) -> bool:
    return row["kind"] == "speed" and row["label"].startswith("full load")


def check_outputs(rows: Iterable[Row]) -> int:
    """Compare answers of each fixed precision, token by token.

    Returns:
        the number of compared answers.

    Raises:
        OutputsDifferError: an answer differs.
    """
    first: dict[str, Row] = {}
    compared = 0
    for row in rows:
        if (precision := row.get("fixed_precision")) is None:
            continue
        before = first.setdefault(precision, row)
        ours, theirs = row["measured"]["outputs"], before["measured"]["outputs"]
        different = [place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
        if different or len(ours) != len(theirs):
            raise OutputsDifferError(
                f'nothing is reported: "{row["label"]}" at {row["budget"]} and "{before["label"]}" at '
                f"{before['budget']} have the same precision and answer differently, beginning with request "
                f"{(different or [min(len(ours), len(theirs))])[0] + 1} of {len(theirs)} (batch {row['batch']}). "
                "Please report this with the folder of rows."
            )
        compared += 0 if before is row else len(ours)
    return compared
