"""How often predictions are acted on: one controller for each system and phase.

A system whose predictor is tuned already, or which has none, is not paced. Others make fewer guesses while guesses do
not pay, and never none, so that a change shows.

A right guess hides at most the transfer of one expert, a wrong one delays demand by at most one projection, a third of
it: where fewer than one in four is needed, guessing loses. It also loses where guesses hide less time than they take
the host: beside a cache that has nearly everything, asking a predictor costs more than the few transfers that are left.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

_LOSES = 1 / 4  # share of guesses that are needed; see above
_PAYS = 1 / 2
# Seconds that guesses hide for each second of the host that they take. It is two that are worth one: what it costs to
# share cores with one more thread is about as much again (benchmarks/LOG.md).
_COSTS_MORE = 2
_WORTH_IT = 4
_JUDGED = 32  # guesses or predictions that a verdict is about, whichever are there first
_FEWEST = 8  # guesses that have a share
_LARGEST_INTERVAL = 64


class Pace(Protocol):
    """Decides which predictions are asked for, and hears what became of them."""

    @property
    def interval(self) -> int:
        """One of so many predictions is asked for."""
        ...

    def acts(self) -> bool:
        """Whether this prediction is one to ask for."""
        ...

    def answer(self, seconds: float) -> None:
        """Record a prediction that named somebody, and the host's time for it."""
        ...

    def spend(self, seconds: float) -> None:
        """Record more time that the host has taken for guesses."""
        ...

    def judge(self, needed: bool, hidden: float) -> None:
        """Record a guess that was right or wrong, and the seconds for which the link had worked for it."""
        ...


class Unpaced:
    """Every prediction is acted on."""

    interval: ClassVar[int] = 1

    def acts(self) -> bool:
        """Always."""
        return True

    def answer(self, seconds: float) -> None:
        """Not counted."""

    def spend(self, seconds: float) -> None:
        """Not counted."""

    def judge(self, needed: bool, hidden: float) -> None:
        """Not counted."""


@dataclass
class PaidPace:
    """Decides which predictions are asked for.

    Attributes:
        interval: one of so many is.
    """

    interval: int = 1
    _predictions: int = 0
    _answers: int = 0  # since the last verdict, as all below
    _judged: int = 0
    _needed: int = 0
    _spent: float = 0.0
    _hidden: float = 0.0

    def acts(self) -> bool:
        """Whether this prediction is one to act on: one in each ``interval``, of another layer each time.

        Every fourth one would be the same layer's in a model of four layers, and if it is the last layer's, nobody's.
        """
        block, place = divmod(self._predictions, self.interval)
        self._predictions += 1
        acts = place == (block * 0x9E3779B1 >> 16) % self.interval
        if acts and max(self._answers, self._judged) >= _JUDGED:
            self._decide()
        return acts

    def answer(self, seconds: float) -> None:
        """Take note of a prediction that named somebody, and of the time that it took the host."""
        self._answers += 1
        self._spent += seconds

    def spend(self, seconds: float) -> None:
        """Take note of more time that the host has taken for guesses."""
        self._spent += seconds

    def judge(self, needed: bool, hidden: float) -> None:
        """Take note of a guess that was right or wrong, and of the seconds for which the link had worked for it."""
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
