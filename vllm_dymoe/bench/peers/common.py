"""What every program that answers a job for a peer does: read it, answer each case, write the row."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.bench.summary import peak_bytes


def answer_job(answer: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answer every case of the job that the command line names.

    Args:
        answer: from a job and one of its cases to what was measured.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["cases"]:
        measured = {"peak_device_bytes": peak_bytes(), "warm_up_requests": case["row"]["workload"]["warm_up"]}
        measured |= answer(job, case)
        append_row(Path(job["out"]), {"key": case["key"], "kind": "speed", **case["row"], "measured": measured})
