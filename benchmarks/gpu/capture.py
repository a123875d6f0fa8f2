"""Graphs of what a function launches."""

from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[[], Any], pool: Any = None, *, warm: bool = True) -> Any:
    """A graph, captured as vLLM does: any thread that disturbs it fails it.

    Args:
        function: launches only.
        pool: of memory, shared by graphs that are replayed in order; None for one of its own.
        warm: launch it once before, on the stream of the capture, which compiles what is not compiled yet.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if warm:
        with torch.cuda.stream(stream):
            function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="global"):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
