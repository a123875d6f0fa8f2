"""Rows of ``vllm-dymoe bench --prefixes``.

They have cold prompts, cached prefixes and decoding requests side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.cases import digest
from vllm_dymoe.bench.prompts import PromptSet
from vllm_dymoe.bench.rows import ROWS, Row, read_rows
from vllm_dymoe.bench.run import run_job

PROGRAM = "vllm_dymoe.vllm_plugin.prefixes"
CASES = ("cold", "cached", "new tail", "beside decoding")
"""Seconds to the first token of a prompt: unseen, the same again, a cached prefix with a new end, beside requests that
decode."""
DECODING = ("a decode step", "longest beside a prompt")
"""Seconds between two tokens of a request that decodes: alone with others like it, and the longest while a prompt is
read."""
_ROUNDS, _REQUESTS = 5, 8


def measure_prefixes(
    model: str, prompts: PromptSet, budgets: Sequence[str], options: Mapping[str, Any], engine: Mapping[str, Any],
    length: int, folder: Path,
) -> list[Row]:  # fmt: skip
    """Return a row for each budget.

    Args:
        folder: of rows; it may have some already.

    Raises:
        ConfigError: the engine fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, cases = folder / ROWS, []
    for budget in budgets:
        about = {"model": model, "budget": budget, "options": dict(options), "engine": dict(engine), "length": length}
        cases.append({**about, "key": digest(["prefixes", prompts.digest, about])})
    known = {row["key"] for row in read_rows(path)}
    if missing := [{**case, "batch": _REQUESTS + 1} for case in cases if case["key"] not in known]:
        job = {
            "label": "prefixes", "model": model, "options": dict(options), "random_length": None,
            "engine": {"enable_prefix_caching": True, **engine}, "texts": [prompt.text for prompt in prompts.prompts],
            "length": length, "decoding": _REQUESTS, "rounds": _ROUNDS, "out": str(path.resolve()), "cases": missing,
        }  # fmt: skip
        run_job(job, folder, PROGRAM)
    rows = {row["key"]: row for row in read_rows(path)}
    return [rows[case["key"]] for case in cases]


def cells(row: Row) -> dict[str, str]:
    """Return a row as text.

    It has milliseconds, and names what is slower than it should be.
    """
    measured = row["measured"]
    found = {"budget": row["budget"], "tokens": str(row["length"])}
    found |= {f"{name}, ms": f"{1e3 * measured[name]:.1f}" for name in (*CASES, *DECODING)}
    return found | {"slower than it should be": ", ".join(wrong(row)) or "nothing"}


def wrong(row: Row) -> list[str]:
    """Return the cases that are slower than they should be.

    They are those slower than a cold prompt, and "decoding" if it waits for more than one chunk.
    """
    measured, chunk = row["measured"], row["measured"]["cold"] / row["chunks"]
    found = [name for name in ("cached", "new tail") if measured[name] > measured["cold"]]
    waits = measured["longest beside a prompt"] > measured["a decode step"] + 1.5 * chunk
    return found + ["decoding"] * waits
