"""One threshold for all layers and tokens: an expert is high if its share of a step's routing weights is above it.

A share counts in even ones: that of an expert, times the number of active experts. So one token and a batch, a layer
of few active experts and one of many have one scale. An integral controller moves the threshold until the average
share of high experts is the retention; all of it is whole numbers, so that host and device agree to the bit
(``precisions_of`` in ``kernels/triton/planner.py``).

One expert of a layer is always high. Where fewer than 1 / retention are active even that one is too many, so that no
threshold meets the retention: there the controller rests, or it would wind up while single tokens are decoded, and the
next batch would be served low until it had come down again.

A threshold is int64 [2]: its value in 2 ** -32 even shares, and the retention in 2 ** -16; less than 0 where none is in
use and ``Table.critical`` says how many experts are high.

A *curve* says where one begins: the values above which so many of the experts of a calibration's routers were.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.rule import Ints

NO_THRESHOLD = (0, -1)
GAIN = 10  # an expert too many in a layer of n moves the threshold by 2 ** (GAIN - 16) / n
MOST = 16 << 32  # of a threshold's value, where retention 0 begins: no retention above e ** -16 needs more
RETENTIONS = tuple(part / 16 for part in range(1, 17))  # of the values of a curve


def threshold_for(retention: float, curve: Sequence[float] = ()) -> Ints:
    """Where to begin: by a curve, or as if weights fell exponentially, which a few hundred layers put right."""
    value = -math.log(retention) if retention > 0 else 16.0
    if curve:
        value = float(np.interp(retention, RETENTIONS, curve))
    return np.array([min(int(value * (1 << 32)), MOST), int(retention * (1 << 16))], np.int64)


def curve_of(layers: Sequence[NDArray[np.float32]]) -> tuple[float, ...]:
    """Of shares in even ones, float32 [any, active] each; the largest of a row is high wherever the threshold is."""
    for shares in layers:
        shares[np.arange(len(shares)), shares.argmax(1)] = np.inf
    every = np.sort(np.concatenate([shares.ravel() for shares in layers]))
    found = every[[int((1 - retention) * (len(every) - 1)) for retention in RETENTIONS]]
    return tuple(np.minimum(found, 16.0).round(4).tolist())


def above(threshold: Ints, sums: Ints, counted: int | None = None) -> NDArray[np.bool_]:
    """Which of a layer's active experts are high, by their sums int64 [active] of routing weights in 1 / WEIGHT_UNIT;
    the one of the largest sum always is, of equal ones the first. Shares are even among so many of them, or all."""
    parts = sums >> 20
    high = parts * (len(sums) if counted is None else counted) << 16 > (threshold[0] >> 16) * parts.sum()
    if len(sums):
        high[sums.argmax()] = True
    return high


def follow(threshold: Ints, high: int, active: int) -> None:
    """Move it after a layer in which so many of the active experts were high; too few active ones say nothing."""
    retention = int(threshold[1])
    if active and active * retention >= 1 << 16:
        error = (high << 16) // active - retention
        threshold[0] = min(max(int(threshold[0]) + (error << GAIN), 0), MOST)
