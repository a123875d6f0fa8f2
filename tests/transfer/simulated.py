"""A device whose copies and computation happen late, in an order that only its events fix.

Everything enqueued is an operation on one of several streams. ``run`` executes
them one at a time, each time choosing at random among the streams whose next
operation does not wait for an event that has not happened. A missing wait is
then a wrong byte under some seed, and not just a possibility.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Event:
    """Happened once its stream reached it."""

    happened: bool = False


@dataclass
class SimulatedStreams:
    """Three in-order queues: demand copies, background copies, computation."""

    seed: int
    queues: dict[str, deque[Any]] = field(
        default_factory=lambda: {name: deque() for name in ("urgent", "background", "compute")}
    )

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def copy(self, source: torch.Tensor, destination: torch.Tensor, *, urgent: bool, after: Any) -> Event:
        """Enqueue a copy in two halves, so that another stream can see it half done."""
        queue = self.queues["urgent" if urgent else "background"]
        if after is not None:
            queue.append(after)
        half = source.numel() // 2
        queue.append(lambda: destination[:half].copy_(source[:half]))
        queue.append(lambda: destination[half:].copy_(source[half:]))
        return self._record(queue)

    def compute(self, work: Callable[[], None]) -> None:
        """Enqueue computation."""
        self.queues["compute"].append(work)

    def computation_waits(self, event: Event) -> None:
        """Enqueue a wait on the computing stream."""
        self.queues["compute"].append(event)

    def record_computation(self) -> Event:
        """An event behind the computation so far."""
        return self._record(self.queues["compute"])

    def synchronize(self, event: Event) -> None:
        """Run until the event has happened."""
        while not event.happened:
            self._step()

    def happened(self, event: Event) -> bool:
        """Whether the event has happened."""
        return event.happened

    def run(self) -> None:
        """Run everything."""
        while any(self.queues.values()):
            self._step()

    def _record(self, queue: deque[Any]) -> Event:
        event = Event()
        queue.append(lambda: setattr(event, "happened", True))
        return event

    def _step(self) -> None:
        ready = [q for q in self.queues.values() if q and (not isinstance(q[0], Event) or q[0].happened)]
        assert ready, "the streams wait for each other"
        operation = self._random.choice(ready).popleft()
        if not isinstance(operation, Event):
            operation()
