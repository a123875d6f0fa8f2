"""From measurements to the table and to a verdict on each aim. No GPU is needed for this part."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import put

README = Path(__file__).with_name("README.md")

AIMS = (
    "decode at 1 token and 4 bits: at least 70 % of the measured copy bandwidth on Mixtral-8x7B",
    "prefill at 4096 tokens and 4 bits: at least 60 % of the measured dense bf16 rate on Mixtral-8x7B",
    "decode at 1 token on Mixtral-8x7B: 2 bits at least 1.5 times as fast as 4 bits",
    "fetch-through from pinned memory: at least 85 % of the measured host-to-device copy bandwidth",
)


def verdicts(results: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """Each aim, what was measured of it, and whether it is reached; aims whose rows are missing are left out."""
    rows = {(row["model"], row["tiers"], row["tokens"]): row for row in results["rows"]}
    found = []
    one, two = rows.get(("Mixtral-8x7B", "4", 1)), rows.get(("Mixtral-8x7B", "2", 1))
    many = rows.get(("Mixtral-8x7B", "4", 4096))
    if one:
        found.append((AIMS[0], one["copy_bandwidth_share"], one["copy_bandwidth_share"] >= 0.7))
    if many:
        found.append((AIMS[1], many["matmul_rate_share"], many["matmul_rate_share"] >= 0.6))
    if one and two:
        ratio = one["time_us"] / two["time_us"]
        found.append((AIMS[2], ratio, ratio >= 1.5))
    fetch = results.get("fetch_host_bandwidth_share")
    if fetch is not None:
        found.append((AIMS[3], fetch, fetch >= 0.85))
    return found


def markdown(results: dict[str, Any]) -> str:
    """The table of a card."""
    lines = [
        f"{results['card']}, {results['date']}, torch {results['torch']}, Triton {results['triton']}. Measured first: "
        f"copy {results['copy_gb_per_s']:.0f} GB/s, dense bf16 {results['matmul_tflop_per_s']:.0f} TFLOP/s, "
        f"from the host {results['host_gb_per_s']:.1f} GB/s.",
        "",
        "| model | tiers | tokens | bound us | time us | bound/time | GB/s | of the copy | TFLOP/s | of the product "
        "| dequantize, mm us | wna16 us | Marlin us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        cells = [row["model"], row["tiers"], str(row["tokens"]), f"{row['bound_us']:.1f}", f"{row['time_us']:.1f}"]
        cells += [f"{row['bound_share']:.0%}", f"{row['gb_per_s']:.0f}", f"{row['copy_bandwidth_share']:.0%}"]
        cells += [f"{row['tflop_per_s']:.1f}", f"{row['matmul_rate_share']:.0%}"]
        others = (row[name] for name in ("dequantize_matmul_us", "wna16_us", "marlin_us"))
        cells += ["" if time is None else f"{time:.1f}" for time in others]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"vLLM's kernels for 4 bits. {' '.join(results['vllm_notes'])}", ""]
    lines += [f"- {aim}: {value:.2f}, {'reached' if ok else 'not reached'}" for aim, value, ok in verdicts(results)]
    return "\n".join([*lines, ""])


def write_readme(results: dict[str, Any], path: Path = README) -> None:
    """Put the table between the README's markers."""
    put(path, "measured", markdown(results))
