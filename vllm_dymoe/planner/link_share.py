"""Limits the share of the time that steps wait for the link.

An integral controller moves the thresholds above which steps fetch: every EVERY steps they move by GAIN times the
difference between the measured and the allowed share of waiting time. They stay between 0, where everything is fetched,
and MOST, which no single token's expert exceeds, so the controller never winds up.
"""

import time
from collections.abc import Callable, Sequence

from vllm_dymoe.planner.rule import Ints

EVERY = 8  # steps between two moves; ranks exchange their times as often
GAIN = 2.0  # even shares per share of time
MOST = 16.0  # even shares
_IDLE = 1.0  # seconds between steps that count as idle, not as time of a step


class LinkShare:
    """The thresholds and the allowed share of waiting.

    Thresholds are int64 [2] each, for retention 0, so that nothing else moves them.
    """

    def __init__(
        self, thresholds: Sequence[Ints], share: float, agree: Callable[[Sequence[int]], Sequence[int]] = list,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._thresholds, self._share, self._agree, self._clock = thresholds, share, agree, clock
        self._steps, self._at, self._waited = 0, clock(), 0.0
        self._time = self._waiting = 0.0

    def begin_step(self, waited: float) -> None:
        """Begin a step, given the seconds waited so far, or since statistics were reset."""
        now = self._clock()
        elapsed, self._at = now - self._at, now
        new = waited - self._waited if waited >= self._waited else waited
        self._waited = waited
        if elapsed < max(_IDLE, 2 * new):
            self._time, self._waiting = self._time + elapsed, self._waiting + new
        self._steps += 1
        if self._steps % EVERY == 0 and self._thresholds:
            error = self._waiting / self._time - self._share if self._time else 0.0
            value = int(self._thresholds[0][0]) + int(GAIN * error * (1 << 32))
            (value,) = self._agree([min(max(value, 0), int(MOST * (1 << 32)))])
            for threshold in self._thresholds:
                threshold[0] = value
            self._time = self._waiting = 0.0
