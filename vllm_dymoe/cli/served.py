"""``vllm-dymoe served``: what ``vllm bench serve`` has measured at several loads, as one table."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_dymoe.config import ConfigError

_COLUMNS = {
    "concurrency": ("max_concurrency", "d"),
    "requests": ("completed", "d"),
    "tokens/s": ("output_throughput", ".1f"),
    "TTFT ms": ("median_ttft_ms", ".0f"),
    "p99": ("p99_ttft_ms", ".0f"),
    "TPOT ms": ("median_tpot_ms", ".1f"),
    "p99 ": ("p99_tpot_ms", ".1f"),
}


def run(folder: Path) -> None:
    """Print a line for each result file, by concurrency.

    Raises:
        ConfigError: there is none, or a file is something else.
    """
    results = sorted((_read(path) for path in folder.rglob("*.json")), key=lambda found: found["max_concurrency"] or 0)
    if not results:
        raise ConfigError(f"{folder} has no result of `vllm bench serve --save-result`.")
    table = Table(title=str(folder), title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for found in results:
        values = ((found.get(field), form) for field, form in _COLUMNS.values())
        table.add_row(*("" if value is None else format(value, form) for value, form in values))
    Console().print(table)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        found["max_concurrency"], found["output_throughput"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no result of `vllm bench serve` ({error!r}); name a folder of its own."
        ) from error
    return dict(found)
