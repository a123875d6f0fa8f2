"""The precision threshold, above which experts are high.

An expert is high if its share of a step's routing weights is above the threshold. One threshold serves all layers and
tokens. Shares are in multiples of an even share: an expert's share times the number of active experts. So one token and
a batch, and layers with few or many active experts, share one scale. An integral controller moves the threshold until
the average share of high experts is the retention. All of it is integer arithmetic, so that host and device agree bit
for bit (``precisions_of`` in ``kernels/triton/planner.py``). If ranks have parts of a layer's experts, weights and
experts are those of all ranks, so that all of them choose alike.

One expert of a layer is always high. If fewer than 1 / retention experts are active, even that one is too many, and no
threshold meets the retention. Then the controller rests. Otherwise it would wind up while single tokens are decoded,
and the next batches would be served low until it had come down again.

With retention 0 the threshold does not move by itself; ``LinkShare`` moves it between steps.

A threshold is int64 [2]: its value in 2 ** -32 even shares, and the retention in 2 ** -16. A negative retention means
that no threshold is in use, and ``Table.critical`` gives the number of high experts.

A *curve* gives the start value for each retention, derived from the shares of a calibration's routers.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.rule import Ints

NO_THRESHOLD = (0, -1)
GAIN = 10  # one high expert too many among n active ones moves the threshold by 2 ** (GAIN - 16) / n
MOST = 16 << 32  # largest value, and the start for retention 0; no retention above e ** -16 needs more
RETENTIONS = tuple(part / 16 for part in range(1, 17))  # for which a curve has values


def threshold_for(retention: float, curve: Sequence[float] = ()) -> Ints:
    """Return the threshold at its start value.

    The value is a curve's; without a curve it is that of exponential weights, which some hundred layers correct.
    """
    value = -math.log(retention) if retention > 0 else 16.0
    if curve:
        value = float(np.interp(retention, RETENTIONS, curve))
    return np.array([min(int(value * (1 << 32)), MOST), int(retention * (1 << 16))], np.int64)


def curve_of(layers: Sequence[NDArray[np.float32]]) -> tuple[float, ...]:
    """Return the curve of shares, float32 [any, active] per layer.

    Overwrites the largest share of each row, whose expert is always high.
    """
    for shares in layers:
        shares[np.arange(len(shares)), shares.argmax(1)] = np.inf
    every = np.sort(np.concatenate([shares.ravel() for shares in layers]))
    found = every[[int((1 - retention) * (len(every) - 1)) for retention in RETENTIONS]]
    return tuple(np.minimum(found, 16.0).round(4).tolist())


def above(threshold: Ints, sums: Ints, counted: int | None = None) -> NDArray[np.bool_]:
    """Return which of a layer's active experts are high, bool [active].

    The expert with the largest sum always is, unless the retention is 0; among equals the first.

    Args:
        sums: int64 [active], sums of routing weights in 1 / WEIGHT_UNIT.
        counted: number of experts that an even share refers to; None for all active ones.
    """
    parts = sums >> 20
    high = parts * (len(sums) if counted is None else counted) << 16 > (threshold[0] >> 16) * parts.sum()
    if len(sums) and threshold[1]:
        high[sums.argmax()] = True
    return high


def follow(threshold: Ints, high: int, active: int) -> None:
    """Move the threshold after a layer with ``high`` of ``active`` experts high.

    The threshold rests if too few experts are active.
    """
    retention = int(threshold[1])
    if active and active * retention >= 1 << 16:
        error = (high << 16) // active - retention
        threshold[0] = min(max(int(threshold[0]) + (error << GAIN), 0), MOST)
