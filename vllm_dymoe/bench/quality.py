"""Quality cells through lm-eval: tasks and options as a grid, each cell a process of its own and a row on disk.

``python -m`` this module is lm-eval, with its arguments, where the option ``system`` may name what only bench compares.
"""

import importlib.util
import json
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.bench.cases import digest
from vllm_dymoe.bench.rows import ROWS, Row, append_row, read_rows
from vllm_dymoe.bench.run import run_logged
from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.config import ConfigError

_METRICS = ("acc,none", "exact_match,strict-match", "exact_match,number", "exact_match,none", "pass@1,create_test",
            "word_perplexity,none")  # fmt: skip


def available() -> str | None:
    """Why quality cannot be measured here; None if it can."""
    found = importlib.util.find_spec("lm_eval") is not None
    return None if found else "quality needs lm-eval: pip install 'vllm-dymoe[eval]'."


def score(
    model: str,  # as for ``vllm serve``
    options: Mapping[str, Any],  # of the plugin
    tasks: Sequence[str],  # of lm-eval
    folder: Path,  # for rows and logs
    *,
    limit: int | None = None,  # questions of each task; all of them if None
    include: Path | None = None,  # folder of tasks that lm-eval does not know
    engine: Mapping[str, Any] | None = None,  # arguments of vLLM
) -> Row:
    """Scores of tasks, 0 to 1, or perplexities, each measured once for a folder; ConfigError if lm-eval failed."""
    engine = dict(engine or {})
    asked = {"model": model, "options": dict(options), "tasks": list(tasks), "limit": limit, "engine": engine}
    key = "quality-" + digest(asked)
    for row in read_rows(folder / ROWS):
        if row["key"] == key:
            return row
    settings = {"pretrained": model, "quantization": "dymoe", "enable_prefix_caching": False}
    if not torch.cuda.is_available():  # compiling for a CPU takes longer than most cells
        settings["enforce_eager"] = True
    variables = {
        f"DYMOE_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
    }
    log = folder / "logs" / f"{key}.log"
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "vllm_dymoe.bench.quality", "--model", "vllm", "--batch_size", "1"]
        command += ["--tasks", ",".join(tasks), "--output_path", work]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in (settings | engine).items())]
        command += ["--limit", str(limit)] if limit else []
        command += ["--include_path", str(include)] if include else []
        run_logged(command, log, "lm-eval", variables)
        files = sorted(Path(work).rglob("results*.json"))
        if not files:
            raise ConfigError(f"lm-eval has written no results; see {log}.")
        scores = read_scores(json.loads(files[-1].read_text()), tasks)
    row = {"key": key, "kind": "quality", **asked, "scores": scores}
    append_row(folder / ROWS, row)
    return row


def read_scores(results: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, float]:
    """The one number of each task; ConfigError if a task has none that is known."""
    found = {}
    for task in tasks:
        metrics = results.get("results", {}).get(task, {})
        name = next((name for name in _METRICS if name in metrics), None)
        if name is None:
            raise ConfigError(f"lm-eval says of {task} only {', '.join(metrics) or 'nothing'}, and none of {_METRICS}.")
        found[task] = float(metrics[name])
    return found


if __name__ == "__main__":
    make_known()
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
