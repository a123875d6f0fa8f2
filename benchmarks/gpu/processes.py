"""Runs parts in their own processes.

A hung part ends at its limit, and a fault of the card ends only one part.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Found

PROGRAM = [sys.executable, str(Path(__file__).with_name("gpu.py"))]
"""Program that runs a part when given --part, --result and --deadline (``time.time``)."""


def run_part(
    name: str,
    limit: float,
    folder: Path,
    tell: Callable[[dict[str, Any]], object] = lambda entry: None,
    under: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Found:
    """Run a part; when its time is over, kill it and all processes that it started.

    Args:
        name: name of the part.
        limit: maximum seconds.
        folder: for its findings, ``NAME.jsonl``, and its output, ``NAME.log``.
        tell: called with each line of findings, while the part runs.
        under: a program with its options that runs the part.
        environment: additional variables.
    """
    found, begin = Found(), time.monotonic()
    results, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    results.write_text("")
    command = [*under, *PROGRAM, "--part", name, "--result", str(results), "--deadline", str(time.time() + limit)]
    with results.open() as lines, log.open("w") as printed:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | (environment or {}),
        )  # fmt: skip
        try:
            ended = False
            while not ended and time.monotonic() - begin < limit:
                time.sleep(0.05)
                ended = process.poll() is not None
                _take(lines, found, tell)
        finally:  # a part may leave compiling workers, engines or a sanitizer's program behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _take(lines, found, tell)
    found.seconds = time.monotonic() - begin
    where = f'in the middle of "{found.under_way}"' if found.under_way else "between two checks"
    if not ended:
        found.failure = f"not finished after {limit:.0f} seconds, {where}; the stacks at that moment are in {log}."
    # A check has reported it already otherwise.
    elif (process.returncode != 0 or not found.complete) and not found.wrong:
        code = process.returncode
        status = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = said[-1].strip() if said else "it printed nothing"
        found.failure = f"it ended with {status} {where}: {last} ({log} has all)."
    return found


def _take(lines: Any, found: Found, tell: Callable[[dict[str, Any]], object]) -> None:
    """Read whole lines only, because the last one may be incomplete."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        tell(found.add(line))
