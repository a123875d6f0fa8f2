"""Graphs of what a function launches."""

from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[[], Any]) -> Any:
    """A graph of launches, captured as vLLM does: any thread that disturbs it fails it. They are launched once before,
    on the stream of the capture, which compiles what is not compiled yet."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
