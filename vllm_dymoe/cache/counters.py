"""What layers found on the device, counted."""

from collections import Counter
from dataclasses import dataclass, field

from vllm_dymoe.planner.precision import Precision


@dataclass
class ResidencyCounts:
    """Counts over layers and steps; a hit needs no transfer, a miss needs one."""

    planned: Counter[Precision] = field(default_factory=Counter)  # experts that the policy gave each precision
    hits: int = 0  # experts that were needed and there
    misses: int = 0
    """Experts that were needed and had to be fetched, or were on their way, or were computed in host memory."""
    cpu_executed: int = 0  # misses that were computed in host memory
    promotions: int = 0  # misses of a high version where the low one was there
    reuses: int = 0  # hits that used a high version where a low one would have done
    evictions: int = 0  # experts that made room for others

    @property
    def hit_rate(self) -> float:
        """Hits among all needed experts; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass
class PrefetchStats:
    """What became of predictions."""

    useful: int = 0  # needed, and there in time as far as they were asked for
    late: int = 0  # needed while they were on their way
    wasted: int = 0  # not needed, after bytes had moved
    cancelled: int = 0  # not needed, or given up for demand, before any byte moved

    def reset(self) -> None:
        self.useful = self.late = self.wasted = self.cancelled = 0
