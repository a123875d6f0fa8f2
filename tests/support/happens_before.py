"""Find races: accesses to memory that no lock or event orders.

Each agent (a host thread or a device stream) counts its own accesses and keeps a vector clock: how far it has followed
the others (Fidge 1988, Mattern 1989). An access is ordered after another if its agent has followed the other's agent
that far. Two unordered accesses to one place, at least one of them a write, are a race: in some interleaving the bytes
are wrong, even if they were right in this one.
"""

import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Agent = Hashable
Clock = Mapping[Agent, int]
"""Number of accesses of each agent that precede a point."""


@dataclass
class _Place:
    """Bytes accessed as a unit: the last write, and each agent's reads since then."""

    name: str
    written: dict[Agent, int] = field(default_factory=dict)
    read: dict[Agent, int] = field(default_factory=dict)


class History:
    """Accesses of all agents to the watched places; can be used by several threads.

    ``races`` contains a sentence for each access that is not ordered after one that it must not overlap.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[Agent, dict[Agent, int]] = defaultdict(dict)
        self._places: dict[int, _Place] = {}
        self._addresses: list[int] = []
        self._lock = threading.Lock()

    def watch(self, memory: torch.Tensor, name: str, sections: Sequence[slice]) -> None:
        """Watch the sections (in bytes) of a tensor from now on, each as one place."""
        for section in sections:
            address = memory.data_ptr() + section.start
            assert address not in self._places, f"{name} is watched already"
            self._places[address] = _Place(f"bytes {section.start} to {section.stop} of {name}")
            insort(self._addresses, address)

    def now(self, agent: Agent) -> Clock:
        """Return the point that an agent has reached: all that it did and followed."""
        with self._lock:
            return dict(self._clocks[agent])

    def follow(self, agent: Agent, point: Clock) -> None:
        """Order everything that ``agent`` does from now on after a point."""
        with self._lock:
            clock = self._clocks[agent]
            for other, count in point.items():
                clock[other] = max(clock.get(other, 0), count)

    def write(self, agent: Agent, memory: torch.Tensor) -> None:
        with self._lock:
            for place in self._watched(memory):
                self._check(agent, "writes", place, "read", place.read)
                self._check(agent, "writes", place, "write", place.written)
                place.written, place.read = {agent: self._tick(agent)}, {}

    def read(self, agent: Agent, memory: torch.Tensor) -> None:
        with self._lock:
            for place in self._watched(memory):
                self._check(agent, "reads", place, "write", place.written)
                place.read[agent] = self._tick(agent)

    def _tick(self, agent: Agent) -> int:
        clock = self._clocks[agent]
        clock[agent] = clock.get(agent, 0) + 1
        return clock[agent]

    def _check(self, agent: Agent, does: str, place: _Place, may_still: str, others: Mapping[Agent, int]) -> None:
        clock = self._clocks[agent]
        for other, count in others.items():
            if clock.get(other, 0) < count:
                self.races.append(f"{_name(agent)} {does} {place.name} while {_name(other)} may still {may_still} it")

    def _watched(self, memory: torch.Tensor) -> Iterator[_Place]:
        begin = memory.data_ptr()
        first = bisect_left(self._addresses, begin)
        stop = bisect_left(self._addresses, begin + memory.numel() * memory.element_size())
        return map(self._places.__getitem__, self._addresses[first:stop])


def _name(agent: Agent) -> str:
    return f"thread {agent.name}" if isinstance(agent, threading.Thread) else f"the {agent} stream"
