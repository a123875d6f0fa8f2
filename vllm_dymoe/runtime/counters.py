"""What layers found on the device, counted."""

from collections import Counter
from dataclasses import dataclass, field

from vllm_dymoe.residency.tier import Tier


@dataclass
class ResidencyCounts:
    """Counts over layers and steps; a hit needs no transfer, a miss needs one.

    Attributes:
        planned: experts that the system gave each tier.
        hits: experts that were needed and there.
        misses: experts that were needed and had to be fetched, or were on their way, or were computed in host memory.
        there: misses that were computed in host memory.
        promotions: misses of a high version where the low one was there.
        reuses: hits that used a high version where a low one would have done.
        evictions: experts that made room for others.
    """

    planned: Counter[Tier] = field(default_factory=Counter)
    hits: int = 0
    misses: int = 0
    there: int = 0
    promotions: int = 0
    reuses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among all needed experts; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass
class PrefetchStats:
    """What became of guesses.

    Attributes:
        useful: needed, and there in time as far as they were asked for.
        late: needed while they were on their way.
        wasted: not needed, after bytes had moved.
        cancelled: not needed, or given up for demand, before any byte moved.
    """

    useful: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self.useful = self.late = self.wasted = self.cancelled = 0
