"""The residency rule: which experts a layer keeps, decided by integers alone.

*Heat* is an aged count of uses: with each step of a layer every expert loses a sixteenth of its heat, and each expert
that the step uses gains 1 << 16. The *victim* is the coldest expert, the one that was used longest ago among equals. It
is *admission* that an expert which is colder than every other is used without being kept.

Everything is integer arithmetic, so that a second writing, for a device, can give the same rows bit for bit.
``benchmarks/cache`` measures the rule against least recently used and against the optimum.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AGING = 4
"""Heat loses a share of 2 ** -AGING with each step: 16 steps are what it remembers."""
USE = 1 << 16
"""Heat of one use; at most USE << AGING adds up."""
_STEPS = 1 << 40  # more than a server can run: heat and step fit into one int64 that orders by both


def record_uses(heat: NDArray[np.int64], used_at: NDArray[np.int64], active: Sequence[int], step: int) -> None:
    """Age a layer's heat by one step, and count what the step uses.

    Args:
        heat: int64 [experts], changed in place.
        used_at: int64 [experts], the step of each expert's last use, changed in place.
        active: experts that the step uses, each once.
        step: number of the step, larger than those before it and below 2 ** 40.
    """
    heat -= heat >> AGING
    chosen = list(active)
    heat[chosen] += USE
    used_at[chosen] = step


def coldest(heat: NDArray[np.int64], used_at: NDArray[np.int64], among: Sequence[int]) -> int:
    """The expert to give up: the coldest, the one used longest ago among equals, the first of them if that is equal.

    Args:
        heat: int64 [experts].
        used_at: int64 [experts].
        among: experts that may be given up, at least one, in ascending order where ties are to be reproduced.
    """
    candidates = np.fromiter(among, dtype=np.int64, count=len(among))
    return int(candidates[np.argmin(heat[candidates] * _STEPS + used_at[candidates])])


def admits(heat: NDArray[np.int64], expert: int, victim: int) -> bool:
    """Whether a missing expert is worth more than the coldest that is kept."""
    return bool(heat[expert] >= heat[victim])
