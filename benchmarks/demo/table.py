"""Put what the demo measured into this folder's README.md.

Reads the file that ``demo.py --json FILE`` wrote and replaces what stands between
the markers of the table, so that no number in the README is typed by hand.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

from demo import ENGINES, equal_share

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown, put

README = Path(__file__).with_name("README.md")


def rows(results: dict) -> list[list[str]]:
    """One row per engine: latency, rate, hits, bytes and equal tokens."""
    reference = results["vLLM"]["tokens"]
    table = []
    for name, data in results.items():
        stats = data["stats"]
        table.append(
            [
                name,
                f"{statistics.median(data['ttft_ms']):.0f}",
                f"{statistics.median(data['tpot_ms']):.1f}",
                f"{data['batch_tokens_per_second']:.0f}",
                "all" if stats is None else f"{stats['peak_expert_bytes'] / 2**20:.2f} MiB",
                "" if stats is None else f"{stats['hit_rate']:.0%}",
                "" if stats is None else f"{sum(stats['bytes_moved'].values()) / 2**20:.0f} MiB",
                f"{equal_share(data['tokens'], reference, comparable=False):.1%}",
                f"{equal_share(data['tokens'], reference, comparable=True):.1%}",
            ]
        )
    return table


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results = json.loads(parser.parse_args().results.read_text())
    assert list(results) == list(ENGINES)
    head = ["", "TTFT ms", "TPOT ms", "batch of 16, tokens/s", "experts on device", "hits", "moved", "equal tokens"]
    head.append("to first difference")
    machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    note = f"Medians of one run on one {machine}; one request at a time but for the batch."
    put(README, "demo", markdown(head, rows(results)) + "\n\n" + note)


if __name__ == "__main__":
    main()
