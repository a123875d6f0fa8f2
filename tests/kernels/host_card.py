"""The host in place of a card: it executes torch.cuda's calls immediately.

Streams execute in the order of their calls, so tests with it cannot show that events order work correctly. Graphs work
as in CUDA: what was computed during the capture is computed again, from the same addresses and into the same addresses,
whatever became of the tensors. What a real capture refuses is refused here, too.
"""

import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.kernels.on_the_host import OnTheHost
from tests.support.launches import Launch, tensors
from vllm_dymoe.cache.device_memory import CudaMemory


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _refuse_in_capture("synchronizing with an event")


class Stream:
    """A stream on which work is done as soon as it is enqueued."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        _refuse_in_capture("synchronizing with a stream")


@contextmanager
def on_stream(stream: Stream) -> Any:
    yield


_CAPTURES: list["_Record"] = []


def _refuse_in_capture(what: str) -> None:
    if _CAPTURES:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


class _Record(TorchDispatchMode):
    def __init__(self, graph: "Graph") -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            _refuse_in_capture("reading a value")
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        result = function(*args, **kwargs)
        self._graph.fresh += [t for t in tensors(result) if t.untyped_storage().data_ptr() not in before]
        self._graph.steps.append(Launch(function, args, kwargs, tensors(result)))
        return result


class Graph:
    def __init__(self) -> None:
        self.steps: list[Launch] = []
        self.fresh: list[torch.Tensor] = []

    def replay(self) -> None:
        for step in self.steps:
            step.replay()


class graph:  # noqa: N801 - as in torch.cuda
    """Capture only calls of its own thread, because other threads use other streams."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> None:
        self._graph = graph
        self._record = _Record(graph)

    def __enter__(self) -> None:
        _CAPTURES.append(self._record)
        self._record.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._record.__exit__(*error)
        _CAPTURES.remove(self._record)
        for tensor in self._graph.fresh:  # a capture computes nothing
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _synchronize(device: Any = None) -> None:
    _refuse_in_capture("synchronizing with the device")


_PROPERTIES = SimpleNamespace(L2_cache_size=0, pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
_SERVER = SimpleNamespace(cudaHostRegister=lambda *arguments: 0, cudaHostUnregister=lambda *arguments: 0)


def _captured_launches() -> None:
    """Make launches of Triton's interpreter operations of a graph."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _CAPTURES:
            return launch(self, *args, **kwargs)
        with _disable_current_modes():
            _CAPTURES[-1]._graph.steps.append(Launch(launch, (self, *args), kwargs, []))
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def capturing() -> list[Launch] | None:
    """Return the operations that the running capture has recorded so far."""
    return _CAPTURES[-1]._graph.steps if _CAPTURES else None


CARD = {
    "is_available": lambda: True,
    "synchronize": _synchronize,
    "get_device_capability": lambda *device: (9, 0),
    "get_device_name": lambda *device: "a card",
    "get_device_properties": lambda device: _PROPERTIES,
    "mem_get_info": lambda *device: (1 << 26, 1 << 26),
    "memory_allocated": lambda *device: 0,
    "max_memory_allocated": lambda *device: 0,
    "empty_cache": lambda: None,
    "device": nullcontext,
    "set_device": lambda device: None,
    "current_stream": lambda *device: Stream(),
    "current_device": lambda: 0,
    "cudart": lambda: _SERVER,
    "Stream": Stream,
    "stream": on_stream,
    "graph": graph,
    "graph_pool_handle": lambda: object(),
    "CUDAGraph": Graph,
    "Event": Event,
    "_sleep": lambda cycles: None,
}
"""Replacements for the members of torch.cuda, by name."""


class Inline:
    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def map(self, function, *arguments):
        return map(function, *arguments)


def put_in_place() -> OnTheHost:
    """Install the replacements for the rest of this process.

    The caller keeps the returned mode, which stays active.
    """
    for name, value in CARD.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda tensor, stream: None
    CudaMemory.shares_addresses = lambda memory: True
    CudaMemory.ends_long_kernels = lambda memory: False
    _captured_launches()
    mode = OnTheHost()
    mode.__enter__()
    return mode
