"""Rows on disk: JSON lines, each complete or not there, so that a run that was killed goes on with the next one."""

import json
import os
from pathlib import Path
from typing import Any

from vllm_dymoe.config import ConfigError

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Every complete row; of two with the same key the later one. A last line that a kill has cut is left out.

    Raises:
        ConfigError: another line is not a row.
    """
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
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


def is_full_load(row: Row) -> bool:
    """Whether it says what a step takes with every expert on the device."""
    return row["kind"] == "speed" and row["label"].startswith("full load")


def append_row(path: Path, row: Row) -> None:
    """Add one row, in one write; what a kill has left of another is cut off."""
    with path.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write((json.dumps(row) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
