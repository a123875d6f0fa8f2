"""``vllm-dymoe served``: what ``vllm bench serve`` has measured at several loads, as one table."""

import json
from pathlib import Path

from vllm_dymoe.cli.display import print_table
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
    results = []
    for path in folder.rglob("*.json"):
        try:
            found = json.loads(path.read_text())
            results.append((found["max_concurrency"] or 0, found["output_throughput"], found))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no result of `vllm bench serve` ({error!r}); name a folder of its own."
            ) from error
    if not results:
        raise ConfigError(f"{folder} has no result of `vllm bench serve --save-result`.")
    rows = []
    for _, _, found in sorted(results, key=lambda result: result[0]):
        values = ((found.get(field), form) for field, form in _COLUMNS.values())
        rows.append(["" if value is None else format(value, form) for value, form in values])
    print_table(str(folder), list(_COLUMNS), rows)
