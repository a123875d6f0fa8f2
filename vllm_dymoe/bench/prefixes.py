"""Rows of ``vllm-dymoe bench --prefixes``.

They have cold prompts, cached prefixes and decoding requests side by side.
"""

from collections.abc import Mapping, Sequence
from math import ceil
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
    length: int, folder: Path, conditions: str,
) -> list[Row]:  # fmt: skip
    """Return a row for each budget.

    Args:
        folder: of rows; it may have some already.
        conditions: as those of ``Case``.

    Raises:
        ConfigError: the engine fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, cases = folder / ROWS, []
    for budget in budgets:
        about = {"model": model, "budget": budget, "options": dict(options), "engine": dict(engine), "length": length,
                 "decoding": _REQUESTS, "conditions": conditions}  # fmt: skip
        cases.append({**about, "key": digest(["prefixes", prompts.digest, about])})
    known = {row["key"] for row in read_rows(path)}
    if missing := [{**case, "batch": _REQUESTS + 1} for case in cases if case["key"] not in known]:
        job = {
            "label": "prefixes", "model": model, "options": dict(options), "random_length": None,
            "engine": {"enable_prefix_caching": True, **engine}, "texts": [prompt.text for prompt in prompts.prompts],
            "length": length, "rounds": _ROUNDS, "out": str(path.resolve()), "cases": missing,
        }  # fmt: skip
        run_job(job, folder, PROGRAM)
    rows = {row["key"]: row for row in read_rows(path)}
    return [rows[case["key"]] for case in cases]


def cells(row: Row) -> dict[str, str]:
    """Return a row as text.

    It has milliseconds, and names the columns that are slower than they should be.
    """
    measured = row["measured"]
    found = {"budget": row["budget"], "tokens": str(row["length"])}
    found |= {f"{name}, ms": f"{1e3 * measured[name]:.1f}" for name in (*CASES, *DECODING)}
    return found | {"slower than it should be": ", ".join(wrong(row)) or "nothing"}


def bounds(row: Row) -> dict[str, float]:
    """Return the most seconds that each case should take, by its column.

    A cached prefix must not cost time: a cold prompt bounds it. A prompt beside others that decode shares its steps
    with them, and they take a few of its tokens' places, so it may take as long as a cold prompt and a decode step for
    each chunk, and for the step that is under way when it comes. Those that decode wait for one chunk in addition to
    their own step. A chunk takes a share of the cold prompt; half as much again is allowed, because chunks differ.
    """
    measured, length, chunk = row["measured"], row["length"], row["chunk"]
    cold, step = measured["cold"], measured["a decode step"]
    return {
        "cached": cold,
        "new tail": cold,
        "beside decoding": cold + step * (1 + ceil(length / max(1, chunk - row["decoding"]))),
        "longest beside a prompt": step + 1.5 * cold / ceil(length / chunk),
    }


def wrong(row: Row) -> list[str]:
    """Return the columns whose case is slower than it should be, see :func:`bounds`."""
    return [name for name, most in bounds(row).items() if row["measured"][name] > most]
