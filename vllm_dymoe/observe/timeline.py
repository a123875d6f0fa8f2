"""What ran when: computation, transfers and waits of some steps, as a trace that https://ui.perfetto.dev opens.

Host times are ``time.perf_counter``. A GPU's are events on its streams that are read when the trace is written, so
recording never synchronises. The format is Chrome's trace events: complete events ("X") with begin and duration in
microseconds, one row ("tid") per lane.
"""

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

_MOST_SPANS = 200_000  # some 40 MB of JSON; a step of a large model has a few thousand


class Lane(Enum):
    """A row of the trace."""

    HOST = "host"
    COMPUTE = "compute"
    LINK = "link"


class Clock(Protocol):
    """When something happens on one device."""

    def mark(self) -> Any:
        """The moment that the computation issued so far ends."""
        ...

    def seconds(self, mark: Any) -> float:
        """A mark on the scale of ``time.perf_counter``; a host time is returned as it is."""
        ...


class HostClock:
    """For a device whose computation and transfers run on the host."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """The mark itself."""
        return mark


class CudaClock:
    """Marks are CUDA events; the host waits for them only when they are read.

    Args:
        device: whose current stream computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event behind the work enqueued on the current stream so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """When an event happened."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(mark) / 1e3


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on one lane.

    Attributes:
        lane: the row.
        name: shown to the reader.
        kind: category, which decides the colour.
        begin: mark of the clock, or host time in seconds.
        end: as ``begin``.
        about: further values that the viewer shows.
    """

    lane: Lane
    name: str
    kind: str
    begin: Any
    end: Any
    about: dict[str, Any]


class Timeline:
    """Collects spans; any thread may add one.

    Args:
        clock: the device's.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[Span] = []

    def add(self, lane: Lane, name: str, kind: str, begin: Any, end: Any, **about: Any) -> None:
        """Record a span, unless there are too many already."""
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(Span(lane, name, kind, begin, end, about))

    @property
    def full(self) -> bool:
        """Whether the limit was reached, so that later spans are missing."""
        return len(self._spans) >= _MOST_SPANS

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """Chrome trace events, sorted by begin.

        Args:
            rank: shown as the process id.
        """
        lanes = list(Lane)
        title = f"rank {rank}, the first {_MOST_SPANS} spans" if self.full else f"rank {rank}"
        head = [_name("process_name", rank, 0, title)]
        head += [_name("thread_name", rank, place, lane.value) for place, lane in enumerate(lanes)]
        found: list[dict[str, Any]] = []
        for span in self._spans:
            begin, end = self.clock.seconds(span.begin), self.clock.seconds(span.end)
            found.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.kind,
                    "ts": round(1e6 * begin, 3),
                    "dur": round(1e6 * max(0.0, end - begin), 3),
                    "pid": rank,
                    "tid": lanes.index(span.lane),
                    "args": span.about,
                }
            )
        return head + sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def _name(what: str, rank: int, place: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": place, "args": {"name": name}}
