"""``vllm-dymoe report``: a trace as a page of pictures."""

from pathlib import Path

from rich.console import Console

from vllm_dymoe.config import ConfigError
from vllm_dymoe.traces import Trace
from vllm_dymoe.traces.report import page


def run(trace: Path, out: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written.
        TraceError: the trace cannot be read.
    """
    text = page(Trace.load(trace))
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}).") from error
    Console().print(f"{out} shows it; any browser opens it.", soft_wrap=True, markup=False)
