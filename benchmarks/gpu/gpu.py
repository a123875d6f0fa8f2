"""Is vllm-dymoe correct on this card, and how fast is it?

Takes ten minutes. Needs torch, triton and a CUDA device; the server needs a few packages, whose names are printed if
they are missing. Needs no network and installs nothing. Each part runs in its own process, with a time limit. Speeds
are measured last, and only if everything was correct.
"""

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from processes import run_part
from record import Found, PartEndedError, Recorder

HERE = Path(__file__).parent
README = HERE / "README.md"
sys.path.append(str(HERE.parents[1]))  # an installed package takes precedence
_PACKAGE = ("numpy", "pydantic", "psutil", "safetensors", "xxhash")


@dataclass(frozen=True)
class Part:
    """One part: a function of a module, called with a recorder."""

    question: str  # the question that it answers
    limit: float  # seconds
    needs: tuple[str, ...] = ()  # modules in addition to torch and triton
    program: str = ""  # module.function; if empty, run() of the module with the part's name in parts/


MACHINE, SHORT = "machine", "short"
PARTS = {
    MACHINE: Part("What is this machine?", 60),
    "kernels": Part("Do the kernels agree with float64?", 480),
    "runtime": Part("Does a budget, a store, prefetch or timing change a bit?", 180, _PACKAGE),
    "graphs": Part("Do steps that the device plans compute what the host's do?", 90, _PACKAGE),
    "sanitizer": Part("Does compute-sanitizer find anything?", 330, _PACKAGE),
    SHORT: Part("", 0, _PACKAGE, "parts.sanitizer.short"),  # the steps that the sanitizer runs
    "engine": Part("Does vLLM answer the same with graphs and without, at 100 and 25 %?", 420, _PACKAGE),
    "speeds": Part("How far from the hardware's bound?", 300, _PACKAGE),
    "decode": Part(
        "Is decode on tensor cores right, and how much faster? (first of fifteen minutes on a card)", 170, _PACKAGE
    ),
    "prompts": Part(
        "How long do large batches take, and each policy's decode? (second of fifteen minutes on a card)", 300, _PACKAGE
    ),
    "serving": Part("How many tokens per second, beside vLLM's own? (third of fifteen minutes on a card)", 330),
    "profiled": Part("", 0, _PACKAGE, "parts.decode.profiled"),  # the launches that the profiler inspects
    "layers": Part(
        "How far are the kernels from the bound, for every layer, precision and batch?",
        3600,
        program="kernel_speeds.run",
    ),
}
"""Parts in the order in which they run."""
SPEEDS = "speeds", "decode", "prompts", "serving", "layers"
"""Parts that run only if nothing was wrong, one after the other."""
CORES = 4
"""Threads of a part that runs concurrently with others: most of its time is spent in compilers."""
NAMES = [name for name in PARTS if PARTS[name].question and name != MACHINE]
DEFAULT = [name for name in NAMES if name not in SPEEDS[1:]]


def main(argv: list[str] | None = None) -> int:
    """Check, measure and report; return 0 only if every check is right."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=DEFAULT, metavar="PART", help=", ".join(NAMES))
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON file")
    parser.add_argument("--no-readme", action="store_true", help="leave the README's table as it is")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part is not None:
        return _child(arguments.part, arguments.result, arguments.deadline)
    absent = missing("torch", "triton", *{name for part in arguments.parts for name in PARTS[part].needs})
    if absent:
        print(
            f"gpu: {sys.executable} has no {' and no '.join(absent)}: {sys.executable} -m pip install "
            f"{' '.join(absent)}, or name a Python that has, as in make gpu PYTHON=python3.12.",
            file=sys.stderr,
        )
        return 1
    return _run(arguments.parts, arguments.output, None if arguments.no_readme else README)


def missing(*modules: str) -> list[str]:
    """Return those of the modules that are not installed."""
    return sorted(name for name in modules if importlib.util.find_spec(name) is None)


def _child(name: str, result: Path, deadline: float) -> int:
    """Run one part in this process."""
    if name not in SPEEDS:  # such parts run concurrently
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(deadline - time.time() - 1, 0.1))  # shortly before this process is killed
    record = Recorder(result)
    try:
        module, _, function = (PARTS[name].program or f"parts.{name}.run").rpartition(".")
        getattr(importlib.import_module(module), function)(record)
    except PartEndedError:
        return 1
    record.end()
    return 0


def _run(names: list[str], output: Path, readme: Path | None) -> int:
    from gpu_report import line, markdown, put

    folder = Path(tempfile.mkdtemp(prefix="dymoe-gpu-"))
    found: dict[str, Found] = {}

    def run(name: str) -> None:
        def show(text: str | None) -> None:
            if text:
                print(text if len(together) == 1 else f"{name}:{text}", flush=True)

        show(f" {PARTS[name].question}" if len(together) > 1 else f"{name}: {PARTS[name].question}")
        found[name] = run_part(name, PARTS[name].limit, folder, lambda entry: show(line(entry)))
        if found[name].failure is not None:
            show(f"  FAILED  {found[name].failure}")

    checks = [name for name in PARTS if name in names and name not in SPEEDS]
    for together in ([MACHINE], checks, *([name] for name in PARTS if name in names and name in SPEEDS)):
        if any(part.wrong for part in found.values()):
            break
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES)) as pool:
            list(pool.map(run, together))
    found = {name: found[name] for name in PARTS if name in found}
    wrong = [f"{name}: {sentence}" for name, part in found.items() for sentence in part.wrong]
    print()
    if any(check["wrong"] for part in found.values() for check in part.checks):  # unfinished parts are not wrong
        for part in found.values():
            part.speeds.clear()
    results: dict[str, Any] = {
        **found[MACHINE].facts,
        "date": date.today().isoformat(),
        "right": not wrong,
        "wrong": wrong,
        "not_run": [name for name in names if name not in found],
        "parts": {name: asdict(part) for name, part in found.items() if name != MACHINE},
    }
    if "card" in results:
        path = output / f"gpu-{results['card'].replace(' ', '-')}-{results['date']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{markdown(results)}\nwritten: {path}")
        if readme is not None and not wrong and not results["not_run"] and set(names) == set(DEFAULT):
            put(readme, "gpu", markdown(results))
            print(f"written: the table in {readme}")
    for sentence in wrong:
        print(f"gpu: {sentence}", file=sys.stderr)
    if wrong:
        print("gpu: not right on this machine; no speeds are reported.", file=sys.stderr)
        return 1
    print("gpu: everything that was checked is right.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
