"""One threshold for all layers and tokens: an expert is high if its share of a step's routing weights is above it.

A share counts in even ones: that of an expert, times the number of active experts. So one token and a batch, a layer
of few active experts and one of many have one scale. An integral controller moves the threshold until the average
share of high experts is the retention; all of it is whole numbers, so that host and device agree to the bit
(``tiers_of`` in ``kernels/triton/decide.py``).

A threshold is int64 [2]: its value in 2 ** -32 even shares, and the retention in 2 ** -16; less than 0 where none is in
use and ``Table.critical`` says how many experts are high.
"""

import math

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.residency.rule import Ints

NO_THRESHOLD = (0, -1)
GAIN = 10
"""An expert too many in a layer of n moves the threshold by 2 ** (GAIN - 16) / n."""
MOST = 64 << 32


def threshold_for(retention: float) -> Ints:
    """Where to begin: of weights that fall exponentially so many are above it. A few hundred layers settle it."""
    value = min(-math.log(retention), 16.0) if retention > 0 else 16.0
    return np.array([int(value * (1 << 32)), int(retention * (1 << 16))], np.int64)


def above(threshold: Ints, sums: Ints) -> NDArray[np.bool_]:
    """Which of a layer's active experts are high; the one of the largest sum always is, of equal ones the first.

    Args:
        threshold: as above.
        sums: int64 [active], of routing weights in 1 / WEIGHT_UNIT.
    """
    parts = sums >> 20
    high = parts * len(sums) << 16 > (threshold[0] >> 16) * parts.sum()
    if len(sums):
        high[sums.argmax()] = True
    return high


def follow(threshold: Ints, high: int, active: int) -> None:
    """Move it after a layer in which so many of the active experts were high; none active say nothing."""
    if active:
        error = (high << 16) // active - int(threshold[1])
        threshold[0] = min(max(int(threshold[0]) + (error << GAIN), 0), MOST)
