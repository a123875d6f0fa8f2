"""What ran when: computation, transfers and waits of some steps, as Chrome trace events for https://ui.perfetto.dev.

Host times are ``time.perf_counter``. A GPU's are events on its streams that are read when the trace is written, so
recording never synchronises.
"""

import time
from enum import Enum
from typing import Any

import torch

_MOST_SPANS = 200_000  # some 40 MB of JSON; a step of a large model has a few thousand


class Lane(Enum):
    """A row of the trace."""

    HOST = "host"
    COMPUTE = "compute"
    LINK = "link"
    DISK = "disk"
    BESIDE = "host's cores"


class HostClock:
    """When something happens on a device whose computation and transfers run on the host."""

    def mark(self) -> Any:
        """The moment that the computation issued so far ends."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """A mark on the scale of ``time.perf_counter``; a host time is returned as it is."""
        return float(mark)


class CudaClock(HostClock):
    """Marks are events on the current stream of ``device``; the host waits for them only when they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return float(self._origin_seconds + self._origin.elapsed_time(mark) / 1e3)


class Timeline:
    """Collects spans on the clock of a device; any thread may add one."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self._spans: list[tuple[Lane, str, str, Any, Any, dict[str, Any]]] = []

    def add(self, lane: Lane, name: str, kind: str, begin: Any, end: Any, **about: Any) -> None:
        if len(self._spans) < _MOST_SPANS:
            self._spans.append((lane, name, kind, begin, end, about))

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """Chrome trace events, sorted by begin; the rank is shown as the process id."""
        lanes = list(Lane)
        full = len(self._spans) >= _MOST_SPANS
        title = f"rank {rank}, the first {_MOST_SPANS} spans" if full else f"rank {rank}"
        names = [("process_name", 0, title), *(("thread_name", place, lane.value) for place, lane in enumerate(lanes))]
        head = [{"ph": "M", "name": w, "pid": rank, "tid": place, "args": {"name": name}} for w, place, name in names]
        found: list[dict[str, Any]] = []
        for lane, name, kind, begin, end, about in self._spans:
            ts, until = 1e6 * self.clock.seconds(begin), 1e6 * self.clock.seconds(end)
            found.append({
                "ph": "X", "name": name, "cat": kind, "ts": round(ts, 3), "dur": round(max(0.0, until - ts), 3),
                "pid": rank, "tid": lanes.index(lane), "args": about,
            })  # fmt: skip
        return head + sorted(found, key=lambda event: (event["ts"], -event["dur"]))
