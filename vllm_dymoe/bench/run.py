"""Runs cases in processes of their own, one engine after the other.

An interrupted run is resumed.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe import __version__
from vllm_dymoe.bench.cases import PEERS, Case, groups
from vllm_dymoe.bench.prompts import PromptSet, by_turns
from vllm_dymoe.bench.rows import ROWS, Row, append_row, read_rows
from vllm_dymoe.durable import create
from vllm_dymoe.options import ConfigError, ExpertBudget

ENGINE = "vllm_dymoe.vllm_plugin.measure"
_LOG_LINES = 20
_BYTES = 256 << 20  # bytes that are read and copied to measure the machine's rates


def measure(
    cases: Sequence[Case],
    prompts: PromptSet,
    folder: Path,
    *,
    expert_bytes: int = 0,  # of all experts at 16 bits, for peers with an offload size
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[Row]:
    """Return rows of all cases in order.

    Args:
        folder: of rows; it may contain some already.

    Raises:
        ConfigError: an engine fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS
    known = {row["key"] for row in read_rows(path)}
    if cases and (rates_of := machine_key(cases[0].conditions)) not in known:
        append_row(path, {"key": rates_of, "kind": "machine", **machine()})
    done = sum(case.key in known for case in cases)
    for group in groups(case for case in cases if case.key not in known):
        progress(done, len(cases), group[0].subject.label)
        run_job(job_of(group, prompts, path, expert_bytes), folder)
        done += len(group)
    progress(done, len(cases), "")
    rows = {row["key"]: row for row in read_rows(path)}
    return [rows[case.key] for case in cases]


def machine_key(conditions: str) -> str:
    """Return the key of the row with this machine's rates."""
    return f"machine {conditions}".rstrip()


def job_of(group: Sequence[Case], prompts: PromptSet, out: Path, expert_bytes: int = 0) -> dict[str, Any]:
    first = group[0]
    share = ExpertBudget.parse(first.budget).share if PEERS.get(first.subject.peer) else None
    offloaded: dict[str, Any] = {}
    if share is not None:
        offloaded = {"cpu_offload_gb": (1 - share) * expert_bytes / 2**30, "cpu_offload_params": ["experts"]}
    return {
        "label": first.subject.label,
        "model": first.model,
        "options": first.subject.options,
        "engine": {**first.engine, **offloaded},
        "prompts": [(prompt.text, prompt.output_tokens) for prompt in by_turns(prompts.prompts)],
        "random_length": prompts.random_length,
        "out": str(out.resolve()),
        "cases": [_described(case) for case in group],
    }


def _described(case: Case) -> dict[str, Any]:
    said = asdict(case)
    subject = said.pop("subject")
    del subject["budgets"]
    fixed = {"key": case.key, "kind": "speed", "fixed_precision": case.fixed_precision, "version": __version__}
    return fixed | subject | said


def run_job(job: dict[str, Any], folder: Path, program: str | None = None) -> None:
    """Run one engine in its own process.

    The engine runs without colours and without vLLM's own processes; on a CPU, with a KV cache that leaves room for
    experts.

    Raises:
        ConfigError: it failed; the message has the end of its log.
    """
    log = folder / "logs" / f"{job['cases'][0]['key']}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_COLOR": "0"}
    with tempfile.TemporaryDirectory() as work, open(create(log, exclusive=False), "w") as output:
        output.truncate(0)
        file = Path(work) / "job.json"
        file.write_text(json.dumps(job))
        command = [sys.executable, "-m", program or ENGINE, str(file)]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise ConfigError(f"{job['label']} failed with code {done.returncode}; the end of {log}:\n{end}")


def machine() -> dict[str, Any]:
    """Return this machine's rates.

    They are measured in a process that ends before anything else begins.

    Raises:
        ConfigError: the measurement failed.
    """
    program = "import json; from vllm_dymoe.bench.run import rates; print(json.dumps(rates()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"this machine's bandwidths could not be measured:\n{found.stderr[-2000:]}")
    return {"machine": platform.machine(), "cores": os.cpu_count(), **json.loads(found.stdout)}


def rates() -> dict[str, float | str]:
    """Return this machine's rates of memory and link, in bytes per second.

    They are those of reading device memory, and of copies from host to device; each is the fastest of five.
    """
    cuda = torch.cuda.is_available()
    host = torch.ones(_BYTES, dtype=torch.uint8, pin_memory=cuda)
    memory = torch.ones(_BYTES, dtype=torch.float32, device="cuda") if cuda else host.view(torch.float32)
    target = torch.empty(_BYTES, dtype=torch.uint8, device="cuda" if cuda else "cpu")

    def rate(nbytes: int, action: Callable[[], object]) -> float:
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            action()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return nbytes / min(seconds)

    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_bytes_per_second": rate(memory.nbytes, memory.sum),
        "link_bytes_per_second": rate(_BYTES, lambda: target.copy_(host, non_blocking=True)),
    }
