"""From what `make gpu` found to lines on a terminal and to the README's table. No GPU is needed for this part."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import readme


def line(entry: dict[str, Any]) -> str | None:
    """What the terminal shows of an entry while the parts run."""
    kind = entry["kind"]
    if kind == "check":
        head = f"  {'FAILED' if entry['wrong'] else 'ok':6}  {entry['name']} ({entry['seconds']:.1f} s)"
        return "\n".join([head, *(f"          {sentence}" for sentence in entry["wrong"])])
    if kind == "speed":
        return f"  {' '.join(_cells(entry))}"
    return f"  {entry['sentence']}" if kind == "sentence" else None


def markdown(results: dict[str, Any]) -> str:
    """Everything about one card; no speeds unless all is right."""
    parts = results["parts"]
    text = [
        f"{results['card']}, {results['memory_gib']} GiB, driver {results['driver']}, CUDA {results['cuda']}, torch "
        f"{results['torch']}, Triton {results['triton']}, vLLM {results['vllm'] or 'not installed'}, "
        f"Python {results['python']}, {results['date']}.",
        "",
    ]
    checks = []
    for name, part in parts.items():
        if part["checks"] or part["failure"]:
            wrong = sum(bool(check["wrong"]) for check in part["checks"]) + (part["failure"] is not None)
            verdict = f"{wrong} WRONG" if wrong else f"{len(part['checks'])} right"
            checks.append([name, verdict, f"{part['seconds']:.0f} s", " ".join(part["sentences"])])
        elif name not in ("speeds", "layers"):
            checks.append([name, "left out", "", " ".join(part["sentences"])])
    text.append(readme.markdown(["checked", "", "time", ""], checks))
    speeds = [_cells(speed) for part in parts.values() for speed in part["speeds"]] if results["right"] else []
    if speeds:
        text += ["", readme.markdown(["measured", "bound", "time or rate", "of the bound", ""], speeds)]
        text += [
            "",
            " ".join(
                sentence for name in ("speeds", "layers") if name in parts for sentence in parts[name]["sentences"]
            ),
        ]
    return "\n".join([*text, ""])


def write(results: dict[str, Any], path: Path) -> None:
    """Put the tables between the README's markers."""
    readme.put(path, "gpu", markdown(results))


def _cells(speed: dict[str, Any]) -> list[str]:
    unit = speed["unit"]
    values = [f"{_three(speed[key])} {unit}" for key in ("bound", "measured")]
    return [speed["name"], *values, f"{speed['share']:.0%}", speed["remark"]]


def _three(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
