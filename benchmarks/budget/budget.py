"""What does a byte budget cost, and what does it save? vLLM, accelerate's disk offload and this plugin in one run.

A synthetic model with the layer shapes of Qwen3-30B-A3B is written once (bf16, and in
our format with 4-bit experts). Each system then answers the same prompts in a process
of its own, one after the other on a quiet machine: vLLM with every bf16 expert in
memory, transformers with accelerate and the layers on disk, and vllm-dymoe from the
smallest budget to full residency. Writes results.json, budget.png and the README's table.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model
import report
from engines import SYSTEMS

from vllm_dymoe.store import STORE_VERSION

HERE = Path(__file__).resolve().parent
BUDGETS = ["minimum", "25%", "50%", "100%"]


def prepare(work: Path, layers: int) -> tuple[Path, Path, float | None]:
    """The bf16 checkpoint and ours, written if they are not there; the second number is seconds of packing."""
    bf16, packed, seconds = work / f"bf16-{layers}", work / f"packed-{layers}-version-{STORE_VERSION}", None
    if not (bf16 / "config.json").exists():
        shutil.rmtree(bf16, ignore_errors=True)
        model.write(bf16, layers)
    if not packed.exists():
        begin = time.perf_counter()
        tool = Path(sys.executable).with_name("vllm-dymoe")
        command = [tool, "quantize", bf16, "--out", packed, "--hi", "4", "--lo", "0", "--quantizer", "rtn"]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - begin
    return bf16, packed, seconds


def run(system: str, arguments: argparse.Namespace, bf16: Path, packed: Path, logs: Path) -> dict[str, Any]:
    """One system in a process of its own; what an interrupted run has measured already is not measured again."""
    result, log = logs / f"{system}.json", logs / f"{system}.log"
    if result.exists():
        earlier: dict[str, Any] = json.loads(result.read_text())
        return earlier
    command = [sys.executable, HERE / "engines.py", system, "--bf16", bf16, "--packed", packed, "--result", result]
    command += ["--layers", str(arguments.layers), "--budgets", *arguments.budgets]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        sys.exit(f"{system} failed with {code}; the end of its log {log}:\n" + "".join(log.open().readlines()[-30:]))
    data: dict[str, Any] = json.loads(result.read_text())
    return data


def main() -> None:
    """Prepare, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="12 layers are 15 GB in bf16")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-budget", help="for models")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and budget.png go")
    parser.add_argument("--logs", type=Path, help="folder of an interrupted run, to go on with it")
    arguments = parser.parse_args()
    bf16, packed, seconds = prepare(arguments.work, arguments.layers)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="dymoe-budget-logs-"))
    results: dict[str, Any] = {
        "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "layers": arguments.layers,
        "packing_s": seconds,
        "systems": {},
    }
    for system in arguments.systems:
        print(f"{system}: starting and answering (log: {logs / system}.log) ...", flush=True)
        results["systems"][system] = run(system, arguments, bf16, packed, logs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    report.show(results)
    if set(arguments.systems) == set(SYSTEMS):
        report.draw(results, arguments.out / "budget.png")
    if set(arguments.systems) == set(SYSTEMS) and arguments.out == HERE:
        report.write_readme(results, HERE / "README.md")
        report.write_front_page(results, HERE.parents[1] / "README.md")


if __name__ == "__main__":
    main()
