"""Runs a short program under NVIDIA's compute-sanitizer, if it is available."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from layers import Model
from processes import run_part
from record import Recorder

from parts.stack import Stack, pinned_store

TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
"""Tools and their options; torch asks the driver for functions that it may not have, which is no error of ours."""
LIMIT = 100.0
"""Seconds for each tool, which makes a program 10 to 100 times slower."""
NOTHING = "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards"
"""The last line of a tool that found nothing."""
MODEL = Model(layers=2, experts=4, top_k=2, hidden=136, intermediate=72, group=32)
TOKENS = (1, 40, 2)


def short(record: Recorder) -> None:
    """Run a few short steps, for a sanitizer.

    They have both precisions, decode and grouped launches, and transfers into reused slots.
    """
    with record.check("a few steps at the smallest budget") as wrong:
        store, stack = pinned_store(MODEL, (4, 2)), Stack(MODEL, exact=True)
        server = stack.server(store, 4, 2, "minimum", "next-gate")
        for seed, tokens in enumerate(TOKENS):
            out = stack.step(server, stack.inputs(tokens, seed))[-1].out
            if not out.isfinite().all():
                wrong.append(f"{tokens} tokens: an output is not a number")
        torch.cuda.synchronize()
        server.check_integrity()
        server.close()


def find() -> str | None:
    """Return the path of compute-sanitizer, from PATH or a CUDA toolkit."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(home) / "bin") for home in [*homes, "/usr/local/cuda"] if home]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def run(record: Recorder) -> None:
    """Compile first, without the tools; then run under each."""
    program = find()
    if program is None:
        record.say(
            "Left out: there is no compute-sanitizer here. It comes with NVIDIA's CUDA toolkit; set PATH or CUDA_HOME."
        )
        return
    with record.check("the short program runs by itself") as wrong:
        wrong += _run([])
    if wrong:
        return
    for tool, options in TOOLS.items():
        with record.check(f"{tool} finds nothing") as wrong:
            wrong += _run([program, "--tool", tool, "--error-exitcode", "86", *options])


def _run(under: list[str]) -> list[str]:
    """Return what is wrong, as sentences."""
    folder = Path(tempfile.mkdtemp(prefix="dymoe-sanitizer-"))
    # Every tensor gets its own allocation: in a block of torch's cache an access out of bounds would hit another
    # tensor.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else {}
    wrong = run_part("short", LIMIT, folder, under=under, environment=alone).wrong
    printed = (folder / "short.log").read_text(errors="replace")
    if not under or any(summary in printed for summary in NOTHING):
        return wrong
    reports = [line.strip("= ") for line in printed.splitlines() if line.startswith("=========")]
    told = "; ".join([line for line in reports if line and "COMPUTE-SANITIZER" not in line][:4])
    return [told, *wrong] if told else wrong or ["it reports nothing, not even that it found nothing"]
