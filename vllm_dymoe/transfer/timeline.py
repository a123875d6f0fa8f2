"""What ran when: computation, transfers and waits of some steps, as a trace that https://ui.perfetto.dev opens.

The host's times are ``time.perf_counter``; those of a GPU are events on its streams, read when the trace is made, so
that recording makes nothing wait. The format is Chrome's trace events: complete events ("X") with begin and duration in
microseconds, one row ("tid") for each lane.
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
        """This moment of the computation."""
        ...

    def seconds(self, mark: Any) -> float:
        """When a mark was made, or a host time as it is, on the scale of ``time.perf_counter``."""
        ...


class HostClock:
    """Where computation and transfers are the host's own."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        """A mark is its own time."""
        return mark


class CudaClock:
    """Marks are events; the host waits for them only when they are read.

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
        """An event behind what the computing stream was given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        """When an event happened, or a host time as it is."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin_seconds + self._origin.elapsed_time(mark) / 1e3


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        lane: where.
        name: what, for people.
        kind: what sort of thing, which gives it its colour.
        begin: mark of the clock, or host time.
        end: as ``begin``.
        about: more, for whoever clicks on it.
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
        clock: of the device.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[Span] = []

    def add(self, lane: Lane, name: str, kind: str, begin: Any, end: Any, **about: Any) -> None:
        """Take note of a span, unless there are too many already."""
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(Span(lane, name, kind, begin, end, about))

    @property
    def full(self) -> bool:
        """Whether some spans were left out, because there were more than fit into memory well."""
        return len(self._spans) >= _MOST_SPANS

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """Chrome trace events, in the order of their beginnings.

        Args:
            rank: the process that they are shown as.
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
