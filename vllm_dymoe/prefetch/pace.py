"""Controls how often predictions are acted on, separately for each phase.

A policy whose predictor tunes itself is not paced. Others make fewer predictions while these do not pay, but never
none, so that a change is noticed.

A correct prediction hides at most the transfer of one expert, and a wrong one delays demand by at most one projection,
a third of it: predictions lose if fewer than one in four is needed. They also lose if they hide less time than they
take on the host: with a cache that has nearly everything, predicting costs more than the few remaining transfers.
"""

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
        """Return whether to make this prediction: one in each ``interval``, of another layer each time.

        Every fourth prediction would always belong to the same layer in a model of four layers, perhaps the last, which
        has no next one.
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
        """Record whether a prediction was needed, and for how many seconds the link had worked for it."""
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
