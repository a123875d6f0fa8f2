"""A timeline of whatever an ``LLM`` does inside a ``with`` block, as a file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def timeline(llm: Any, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record every rank's computation, transfers and waits, and write them when the block ends, however it ends.

    Args:
        llm: an ``LLM`` or ``LLMEngine`` with this plugin.
        path: of the JSON file, which https://ui.perfetto.dev opens and ``vllm-dymoe timeline`` draws.

    Raises:
        OSError: the file cannot be written; found out before anything is recorded.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    try:
        llm.collective_rpc("dymoe_start_timeline")
        try:
            yield
        finally:
            ranks = llm.collective_rpc("dymoe_stop_timeline")
            trace = {"traceEvents": [event for events in ranks for event in events], "displayTimeUnit": "ms"}
            partial.write_text(json.dumps(trace))
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
