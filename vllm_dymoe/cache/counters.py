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
    """Counts over layers and steps; a hit needs no transfer, a miss does."""

    planned: Counter[Precision] = field(default_factory=Counter)  # experts that the policy wanted in each precision
    hits: int = 0  # needed experts that were resident
    misses: int = 0
    """Needed experts that were not resident: fetched, in flight, or executed on the CPU."""
    cpu_executed: int = 0  # misses executed on the CPU
    promotions: int = 0  # misses of a high version while the low one was resident
    reuses: int = 0  # hits that used a high version where the low one was wanted
    evictions: int = 0  # experts evicted for others

    def reset(self) -> None:
        self.planned.clear()
        self.hits = self.misses = self.cpu_executed = self.promotions = self.reuses = self.evictions = 0

    def take(self, counters: Any) -> NDArray[np.int64]:
        """Add the counters of planned steps, and zero them.

        ``counters`` is int64 [layers, Counter]; returns a copy of its values.
        """
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
        """Share of hits among all needed experts; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass
class PrefetchStats:
    """Outcomes of predictions."""

    useful: int = 0  # needed, and its requested projections arrived in time
    late: int = 0  # needed while in flight
    wasted: int = 0  # not needed, after bytes had been transferred
    cancelled: int = 0  # not needed, or given up for demand, before any byte was transferred

    def reset(self) -> None:
        self.useful = self.late = self.wasted = self.cancelled = 0
