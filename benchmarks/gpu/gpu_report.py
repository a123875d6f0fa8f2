"""Formats the findings of `make gpu` for a terminal and for the README's table.

No GPU is needed.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from readme import markdown as table
from readme import put as put


def line(entry: dict[str, Any]) -> str | None:
    """Return the line for the terminal when an entry arrives, if it needs one."""
    kind = entry["kind"]
    if kind == "check":
        head = f"  {'FAILED' if entry['wrong'] else 'ok':6}  {entry['name']} ({entry['seconds']:.1f} s)"
        return "\n".join([head, *(f"          {sentence}" for sentence in entry["wrong"])])
    if kind == "speed":
        return f"  {' '.join(_cells(entry))}"
    return f"  {entry['sentence']}" if kind == "sentence" else None


def markdown(results: dict[str, Any]) -> str:
    """Return the report of one card; it has speeds only if all checks are right."""
    parts, checks = results["parts"], []
    for name, part in parts.items():
        said, seconds = " ".join(part["sentences"]), f"{part['seconds']:.0f} s"
        if part["checks"] or part["failure"]:
            wrong = sum(bool(check["wrong"]) for check in part["checks"]) + (part["failure"] is not None)
            checks.append([name, f"{wrong} WRONG" if wrong else f"{len(part['checks'])} right", seconds, said])
        elif name not in ("speeds", "layers"):
            checks.append([name, "left out", "", said])
    text = [
        f"{results['card']}, {results['memory_gib']} GiB, driver {results['driver']}, CUDA {results['cuda']}, torch "
        f"{results['torch']}, Triton {results['triton']}, vLLM {results['vllm'] or 'not installed'}, "
        f"Python {results['python']}, {results['date']}.",
        table(["checked", "", "time", ""], checks),
    ]
    speeds = [_cells(speed) for part in parts.values() for speed in part["speeds"]] if results["right"] else []
    if speeds:
        text.append(table(["measured", "bound", "time or rate", "of the bound", ""], speeds))
        measured = (part for name, part in parts.items() if name in ("speeds", "layers"))
        text.append(" ".join(sentence for part in measured for sentence in part["sentences"]))
    return "\n\n".join(text) + "\n"


def _cells(speed: dict[str, Any]) -> list[str]:
    bound, measured = (  # three significant digits
        f"{value:.0f} {speed['unit']}" if value >= 100 else f"{value:.3g} {speed['unit']}"
        for value in (speed["bound"], speed["measured"])
    )
    known = speed["bound"] > 0
    return [speed["name"], bound * known, measured, f"{speed['share']:.0%}" * known, speed["remark"]]
