"""A recorded device: a real server and engine over memory with recorded accesses.

Copies and computation run when they are issued, so results can be compared. The history decides whether every other
interleaving would give the same: a stream follows the thread that issues its work, the events it is told to wait for,
and nothing else.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.happens_before import Agent, Clock, History
from tests.support.memory_writer import MemoryStore
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import EVERY_PROJECTION, ModelExperts, SliceKey
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.planner.plan import LayerPlan

COMPUTATION = "computation"


class RecordedStore(HostStore):
    """A store in memory whose reads are recorded, with pauses for other threads.

    A read is recorded as a write of the reading thread to the destination. A ``staged`` store lends nothing, so copies
    go through buffers.
    """

    staged = False
    description = "recorded memory"
    whole = readable = True

    def __init__(self, store: MemoryStore, history: History, pause: Callable[[], None]) -> None:
        self.experts: ModelExperts = store.experts
        self._store, self._history, self._pause = store, history, pause

    def packed(self, key: SliceKey, projections: range = EVERY_PROJECTION) -> torch.Tensor:
        return self._store.packed(key, projections)

    def hold(self, key: SliceKey, projections: range = EVERY_PROJECTION, *, wait: bool = True) -> Any:
        """Lend the wrapped store's memory, unless the store is staged."""
        return contextlib.nullcontext() if self.staged else self._store.hold(key, projections, wait=wait)

    def read_into(
        self, key: SliceKey, destination: torch.Tensor, projections: range = EVERY_PROJECTION, *, wait: bool = True
    ) -> None:
        self._pause()
        self._history.write(threading.current_thread(), destination)
        self._store.read_into(key, destination, projections, wait=wait)
        self._pause()

    def close(self) -> None:
        """Does nothing: the bytes belong to the wrapped store."""


class CaptureError(RuntimeError):
    """A call to a device while a graph was being captured on it."""


class RecordedStreams:
    """The streams of a device, with a pause for other threads before each call.

    An event is a point of the history, and ``ended`` reports whether a copy has finished. While a graph is captured the
    device refuses calls from every thread, as in CUDA's capture mode "global", the default of torch.cuda.graph, and one
    such call invalidates the capture; ``intruders`` are the threads that were refused.
    """

    def __init__(self, history: History, pause: Callable[[], None], ended: Callable[[], bool]) -> None:
        self._history, self._pause, self._ended = history, pause, ended
        self.capturing = False
        self.intruders: list[str] = []

    def copy(self, source: torch.Tensor, destination: torch.Tensor, *, urgent: bool, after: Any) -> Clock:
        stream = "urgent" if urgent else "background"
        self._issue(stream)
        if after is not None:
            self._history.follow(stream, after)
        self._history.read(stream, source)
        self._history.write(stream, destination)
        destination.copy_(source)
        return self._history.now(stream)

    def computation_waits(self, event: Clock) -> None:
        self._issue(COMPUTATION)
        self._history.follow(COMPUTATION, event)

    def record_computation(self) -> Clock:
        self._issue(COMPUTATION)
        return self._history.now(COMPUTATION)

    def synchronize(self, event: Clock) -> None:
        self._pause()
        self._refuse_during_capture()
        self._history.follow(threading.current_thread(), event)

    def happened(self, event: Clock) -> bool:
        self._refuse_during_capture()
        ended = self._ended()
        if ended:
            self._history.follow(threading.current_thread(), event)
        return ended

    def begun(self, event: Clock) -> None:
        """Return None: a history has an order but no times."""
        return None

    def _issue(self, stream: Agent) -> None:
        self._pause()
        self._refuse_during_capture()
        self._history.follow(stream, self._history.now(threading.current_thread()))

    def _refuse_during_capture(self) -> None:
        if self.capturing:
            self.intruders.append(threading.current_thread().name)
            raise CaptureError("operation not permitted when stream is capturing")


def record_reads(kernel: CpuKernel, history: History, stream: Agent | None, pause: Callable[[], None]) -> None:
    """Record which weights a kernel reads, with a pause before each projection.

    The kernel computes on the host, as if on ``stream``, or on the calling thread if that is None.
    """
    begin, compute = kernel.begin, kernel.compute
    current: list[LayerPlan] = []

    def begun(x: torch.Tensor, plan: LayerPlan, out: torch.Tensor, activation: Activation) -> None:
        current[:] = [plan]
        begin(x, plan, out, activation)

    def recorded(items: Sequence[int]) -> None:
        agent = threading.current_thread() if stream is None else stream
        for projection in EVERY_PROJECTION:
            pause()
            if stream is not None:
                history.follow(stream, history.now(threading.current_thread()))
            for item in items:
                view = current[0].views[item]
                assert view is not None
                for stored in (view[projection].weight, view[projection].residual):
                    if stored is not None:
                        history.read(agent, stored)
        compute(items)

    kernel.begin, kernel.compute = begun, recorded  # type: ignore[method-assign]
