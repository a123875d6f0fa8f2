"""Limits the share of the time that steps wait for the link.

A controller moves the threshold above which steps fetch. Steps with tokens of prompts have another value than steps
that only decode, because they fetch far more. Every EVERY steps each value is multiplied by 2 ** (RATE * error), where
error is by how much the measured share of waiting exceeds the allowed one, in parts of the latter. One value moves
slowly, because a few steps fetch by chance twice as much or nothing; it rises faster, by at most half an octave, where
steps wait far too long. It stays between LEAST, where nothing worth fetching is left, and MOST, which no single token's
expert exceeds, so it never winds up.

With expert parallelism every rank has a link, and so thresholds, of its own: a rank whose experts are asked for more
often waits longer, and fetches less. What they are compared with are shares of the weights of all ranks' experts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.rule import Ints

EVERY = 8  # steps between two moves; ranks exchange their thresholds as often
RATE, MOST_ERROR = 1 / 8, 4.0  # octaves for an error of 1; the largest error
LEAST, MOST = 1 / 8, 16.0  # even shares
_IDLE = 1.0  # seconds between steps that count as idle, not as time of a step


@dataclass(frozen=True)
class StepTime:
    """Seconds of steps of one phase, and how long they waited for the link."""

    phase: Phase
    seconds: float
    waited: float


class Waits(Protocol):
    """Knows how long steps wait for the link."""

    def begin_step(self, phase: Phase) -> StepTime | None:
        """Begin a step; return what is newly known of earlier ones, or None."""
        ...


class HostWaits:
    """Waits of steps that the host carries out, known when the next step begins.

    Args:
        waited: returns the seconds waited so far, or since statistics were reset.
        clock: in seconds.
    """

    def __init__(self, waited: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._waited, self._clock = waited, clock
        self._running: tuple[Phase, float, float] | None = None  # phase, when it began, seconds waited until then

    def begin_step(self, phase: Phase) -> StepTime | None:
        ended, (now, waited) = self._running, (self._clock(), self._waited())
        self._running = phase, now, waited
        if ended is None:
            return None
        before, begun, until = ended
        return StepTime(before, now - begun, waited - until if waited >= until else waited)


class LinkShare:
    """The thresholds and the allowed share of waiting.

    Args:
        thresholds: of prompts' tokens and of others, int64 [2] each, for retention 0, so that nothing else moves them.
            Both get the value for the step that begins.
        share: share of the time of each phase's steps that they may wait.
        agree: exchanges values with ranks that have other parts of the same experts.
    """

    def __init__(
        self, thresholds: Sequence[Ints], share: float, waits: Waits,
        agree: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> None:  # fmt: skip
        self._thresholds, self._share, self._waits, self._agree = thresholds, share, waits, agree
        self._values = dict.fromkeys(Phase, int(thresholds[0][0]))
        self._steps, self._known = 0, list[StepTime]()

    def begin_step(self, phase: Phase) -> None:
        found = self._waits.begin_step(phase)
        if found is not None and found.seconds < max(_IDLE, 2 * found.waited):
            self._known.append(found)
        self._steps += 1
        if self._steps % EVERY == 0:  # on all ranks in the same step
            moved = self._agree([self._moved(phase) for phase in self._values])
            self._values = dict(zip(self._values, moved, strict=True))
            self._known.clear()
        for threshold in self._thresholds:
            threshold[0] = self._values[phase]

    def _moved(self, phase: Phase) -> int:
        known, value = [of for of in self._known if of.phase is phase], self._values[phase]
        if not (seconds := sum(of.seconds for of in known)):
            return value
        share = sum(of.waited for of in known) / seconds
        error = min(share / self._share - 1, MOST_ERROR)
        return int(min(max(value * 2 ** (RATE * error), LEAST * (1 << 32)), MOST * (1 << 32)))
