"""Counters of hits, misses and predictions."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import Counter as Column


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

    def reset(self) -> None:
        self.planned.clear()
        self.hits = self.misses = self.cpu_executed = self.promotions = self.reuses = self.evictions = 0

    def take(self, counters: Any) -> NDArray[np.int64]:
        """Add the counters of planned steps, int64 [layers, Counter], and zero them; return a copy of them."""
        of_layers = np.array(counters.tolist(), np.int64).reshape(-1, len(Column))  # waits for a device
        values = of_layers.sum(0).tolist()
        counters[:] = 0
        low = values[Column.NEEDED_LOW] - values[Column.SKIPPED]
        self.planned.update(
            {Precision.HIGH: values[Column.NEEDED_HIGH], Precision.LOW: low, Precision.SKIPPED: values[Column.SKIPPED]}
        )
        self.hits += values[Column.HITS]
        self.misses += values[Column.NEEDED_HIGH] + low - values[Column.HITS]
        self.cpu_executed += values[Column.CPU_EXECUTED]
        self.reuses += values[Column.REUSES]
        self.promotions += values[Column.PROMOTIONS]
        self.evictions += values[Column.EVICTIONS]
        return of_layers

    @property
    def hit_rate(self) -> float:
        """Hits among all needed experts; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass
class PrefetchStats:
    """Outcomes of predictions."""

    useful: int = 0  # needed, and there in time as far as they were asked for
    late: int = 0  # needed while they were on their way
    wasted: int = 0  # not needed, after bytes had moved
    cancelled: int = 0  # not needed, or given up for demand, before any byte moved

    def reset(self) -> None:
        self.useful = self.late = self.wasted = self.cancelled = 0
