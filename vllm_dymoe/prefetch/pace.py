"""Controls how often predictions are acted on.

``Pace`` does so on a CPU, ``StepPace`` where a device plans. A policy whose predictor tunes itself is not
paced. Others make fewer predictions while these do not pay, but never none, so that a change is noticed.

A correct prediction hides at most the transfer of one expert, and a wrong one delays demand by at most one projection,
a third of it: predictions lose if fewer than one in four is needed. They also lose if they hide less time than they
take on the host: with a cache that has nearly everything, predicting costs more than the few remaining transfers.
"""

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

_LOSES = 1 / 4  # share of needed predictions below which they lose; see above
_PAYS = 1 / 2
# Seconds that predictions must hide for each second of host time. Two instead of one, because sharing cores with one
# more thread costs about as much again (benchmarks/LOG.md).
_COSTS_MORE = 2
_WORTH_IT = 4
_JUDGED = 32  # predictions needed for a verdict, whichever kind comes first
_FEWEST = 8  # fewest predictions for a share
_LARGEST_INTERVAL = 64


@dataclass
class Pace:
    """Decides which predictions are made, and records their outcomes."""

    paid: bool = True  # predictions must pay for their cost; otherwise every prediction is made
    interval: int = 1  # one of this many predictions is made
    _predictions: int = 0
    _answers: int = 0  # since the last verdict, like all fields below
    _judged: int = 0
    _needed: int = 0
    _spent: float = 0.0
    _hidden: float = 0.0

    def acts(self) -> bool:
        """Return whether to make this prediction.

        One prediction in each ``interval`` is made, of another layer each time. Every fourth prediction would always
        belong to the same layer in a model of four layers, perhaps the last, which has no next one.
        """
        block, place = divmod(self._predictions, self.interval)
        self._predictions += 1
        acts = place == (block * 0x9E3779B1 >> 16) % self.interval
        if acts and self.paid and max(self._answers, self._judged) >= _JUDGED:
            self._decide()
        return acts

    def spend(self, seconds: float, *, answered: bool = True) -> None:
        """Record host time of predictions, and whether a prediction named any expert."""
        self._answers += answered
        self._spent += seconds

    def judge(self, needed: bool, hidden: float) -> None:
        """Record whether a prediction was needed.

        ``hidden`` is the number of seconds that the link had worked for it.
        """
        self._judged += 1
        self._needed += needed
        self._hidden += hidden if needed else 0.0

    def _decide(self) -> None:
        enough = self._judged >= _FEWEST
        if (enough and self._needed < _LOSES * self._judged) or self._hidden < _COSTS_MORE * self._spent:
            self.interval = min(2 * self.interval, _LARGEST_INTERVAL)
        elif self._needed > _PAYS * self._judged and self._hidden > _WORTH_IT * self._spent:
            self.interval = max(self.interval // 2, 1)
        self._answers = self._judged = self._needed = 0
        self._spent = self._hidden = 0.0


_WINDOW = 16  # measured steps
_SETTLING = 2  # steps after a change that are not measured: the first ones begin with what others have left
_FASTER = 0.98  # of the time of a step, below which another step is faster
_KEPT = 64  # steps of each way that are compared


class StepPace:
    """Decides between decode steps, by their times, whether the next ones prefetch.

        with prefetch | without | with prefetch | without | ... | with prefetch (longer and longer) | without | ...

    A trial of the other way lasts one window of steps. The other way is taken if it is clearly faster, and each trial
    in which it is not doubles the steps until the next one. Steps differ by what they miss, often by more than prefetch
    gains, so the latest steps of several trials are compared. Prefetching or not changes no value, so trials are free
    to come while requests are served. Steps count from beginning to beginning, with the same number of tokens.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._times = clock, list[float]()
        self._prefers = self._acts = True
        self._windows, self._steps = 1, 0  # of the preferred way between two trials; its steps since the last one
        self._tokens, self._begun = 0, 0.0
        # By tokens, and by whether they prefetch.
        self._kept = defaultdict[tuple[int, bool], deque[float]](lambda: deque(maxlen=_KEPT))

    @property
    def interval(self) -> int:
        """One of so many windows prefetches; 1 if all do but the trials."""
        return 1 if self._prefers else 1 + self._windows

    def begin_step(self, tokens: int) -> bool:
        """Return whether the step that begins prefetches.

        Args:
            tokens: of a step that decodes; 0 for another one.
        """
        now = self._clock()
        if not tokens or tokens != self._tokens:
            self._times.clear()
            self._acts = self._prefers  # a trial is given up
        else:
            self._times.append(now - self._begun)
            self._steps += self._acts is self._prefers
            self._decide()
        self._tokens, self._begun = tokens, now
        return self._acts

    def _decide(self) -> None:
        if len(self._times) < _WINDOW + _SETTLING:
            return
        if self._acts is self._prefers:
            if self._steps < self._windows * _WINDOW:
                return
            self._keep()
            self._acts = not self._acts
        else:
            self._keep()
            ones, others = (self._kept[self._tokens, acts] for acts in (self._acts, self._prefers))
            if _clearly_faster(ones, others):
                self._prefers, self._windows = self._acts, 1
            else:
                self._acts, self._windows = self._prefers, min(2 * self._windows, _LARGEST_INTERVAL)
            self._steps = 0
        self._times.clear()

    def _keep(self) -> None:
        self._kept[self._tokens, self._acts].extend(self._times[_SETTLING:])


def _clearly_faster(ones: Collection[float], others: Collection[float]) -> bool:
    """Return whether steps are faster than others, beyond chance.

    Of all pairs, one step has to be the faster in more than half by 2.4 standard deviations of that share for equal
    steps (Mann and Whitney 1947).
    """
    ordered = sorted(_FASTER * other for other in others)
    faster = sum(len(ordered) - bisect_right(ordered, one) for one in ones)
    return faster > len(ones) * len(others) * (0.5 + min(len(ones), len(others)) ** -0.5)
