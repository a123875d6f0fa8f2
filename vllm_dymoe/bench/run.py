"""Runs cases in processes of their own, one engine after the other, and goes on where an earlier run was ended."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_dymoe import __version__
from vllm_dymoe.bench.cases import Case, groups
from vllm_dymoe.bench.peers import find_peer
from vllm_dymoe.bench.prompts import PromptSet, by_turns
from vllm_dymoe.bench.rows import Row, append_row, read_rows
from vllm_dymoe.config import ConfigError, ExpertBudget

ROWS = "rows.jsonl"
_LOG_LINES = 20


def measure(
    cases: Sequence[Case],
    prompts: PromptSet,
    folder: Path,
    *,
    expert_bytes: int = 0,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Row]:
    """Rows of all cases, in their order; those that ``folder`` has are not measured again.

    Args:
        cases: all of one workload.
        prompts: that they ask.
        folder: for rows and logs.
        expert_bytes: of all experts at 16 bits, for peers that are told how many bytes to offload.
        progress: called with what comes next, rows that are done, and rows in all.

    Raises:
        ConfigError: an engine has failed; rows that were measured before are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS
    known = {row["key"] for row in read_rows(path)}
    if "machine" not in known:
        append_row(path, {"key": "machine", "kind": "machine", **machine()})
    done = sum(case.key in known for case in cases)
    for group in groups(case for case in cases if case.key not in known):
        progress(group[0].subject.label, done, len(cases))
        run_job(job_of(group, prompts, path, expert_bytes), folder)
        done += len(group)
    progress("", done, len(cases))
    rows = {row["key"]: row for row in read_rows(path)}
    return [rows[case.key] for case in cases]


def job_of(group: Sequence[Case], prompts: PromptSet, out: Path, expert_bytes: int = 0) -> dict[str, Any]:
    """What the process of a group needs to know."""
    first = group[0]
    return {
        "label": first.subject.label,
        "module": _module(first.subject.peer),
        "model": first.model,
        "options": first.subject.options,
        "peer": first.subject.peer,
        "engine": {**dict(first.engine), **_offloaded(first, expert_bytes)},
        "prompts": [(prompt.text, prompt.output_tokens) for prompt in by_turns(prompts.prompts)],
        "random_length": prompts.random_length,
        "out": str(out.resolve()),
        "cases": [
            {"key": case.key, "budget": case.budget, "batch": case.batch, "row": _described(case)} for case in group
        ],
    }


def _offloaded(case: Case, expert_bytes: int) -> dict[str, Any]:
    """Arguments of vLLM that leave a share of the experts on the device."""
    peer = find_peer(case.subject.peer)
    share = ExpertBudget.parse(case.budget).share if peer and peer.takes_budgets else None
    if peer is None or share is None:
        return {}
    return dict(peer.engine(share, expert_bytes))


def _module(peer: str) -> str:
    found = find_peer(peer)
    return found.module if found else "vllm_dymoe.vllm_adapter.measure"


def _described(case: Case) -> dict[str, Any]:
    """What a row says of its case, for tables of later runs as well."""
    return {
        "model": case.model,
        "label": case.subject.label,
        "options": case.subject.options,
        "peer": case.subject.peer,
        "budget": case.budget,
        "batch": case.batch,
        "workload": asdict(case.workload),
        "engine": dict(case.engine),
        "fixed_precision": case.fixed_precision,
        "version": __version__,
    }


def run_job(job: dict[str, Any], folder: Path) -> None:
    """One engine in a process of its own.

    Raises:
        ConfigError: it failed; the sentence has the end of its log.
    """
    log = folder / "logs" / f"{job['cases'][0]['key']}.log"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, log.open("w") as output:
        file = Path(work) / "job.json"
        file.write_text(json.dumps(job))
        code = subprocess.run(
            [sys.executable, "-m", job["module"], str(file)],
            stdout=output, stderr=subprocess.STDOUT, env=environment(), check=False,
        ).returncode  # fmt: skip
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise ConfigError(f"{job['label']} failed with code {code}; the end of {log}:\n{end}")


def environment() -> dict[str, str]:
    """Of a process with an engine: one process, no colours, and on a CPU a KV cache that leaves room for experts."""
    found = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    return found | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_COLOR": "0"}


def machine() -> dict[str, Any]:
    """What this machine reaches, measured in a process that ends before anything else begins."""
    found = subprocess.run(
        [sys.executable, "-m", "vllm_dymoe.bench.machine"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise ConfigError(f"this machine's bandwidths could not be measured:\n{found.stderr[-2000:]}")
    return {"machine": platform.machine(), "cores": os.cpu_count(), **json.loads(found.stdout)}
