"""Hotness of experts over long stretches of traffic, and the high set.

The choice of the high experts is DynaExq's (3.5). Hotness is an exponential average over windows of time, in multiples
of an even share: if a router has no favourites, every expert has hotness 1, whatever the model's size and the number of
tokens. It counts either uses (as in the paper) or squared gates, the squares of an expert's shares of its tokens'
routing weights: the error that a low version adds to an output is proportional to that share, so the squared error is
proportional to its square.

A *margin* keeps the high set from oscillating: an expert replaces another only if it is hotter by more than the margin.
Further damping (slack in ranks, agreement of several windows) kept the set from following traffic (benchmarks/LOG.md).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import MOST_WEIGHT

GATE_UNIT = 1 << 20

Place = tuple[int, int]  # layer and expert


class Swap(NamedTuple):
    """One change of the high set."""

    gain: float  # difference in hotness between the two
    up: Place  # the expert that becomes high
    down: Place | None  # the expert that becomes low, possibly of another layer; None if a place is free


def averaged(score: NDArray[np.float64], counts: NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """Return hotness after one more window of counts: float64 [layers, experts].

    ``counts`` is int64 and has the weight ``alpha``. A layer without counts keeps its hotness. A layer without hotness
    (all zeros) takes over the window's.
    """
    shares, known = even_shares(counts), score.any(1, keepdims=True)
    return np.where(counts.any(1, keepdims=True), np.where(known, score + alpha * (shares - score), shares), score)


def usable(weights: Tensor) -> Tensor:
    """Return which routing weights count in statistics: bool, shaped like ``weights``.

    NaN, infinite and absurdly large weights, which one request can cause, must not affect how later requests are
    served.
    """
    return weights.abs() < MOST_WEIGHT


def squared_gates(weights: Tensor) -> Tensor:
    """Return each choice's squared share of its token's routing weights.

    The result is int64 and shaped like ``weights``, [..., top_k]. The unit is 1 / GATE_UNIT. Integer sums do not depend
    on the order of additions, so ranks agree on which experts are hot. A token with an unusable weight gets zeros.
    """
    exact = weights.double()  # float64, so that the order of the sum does not matter
    share = exact / exact.sum(-1, keepdim=True).clamp(min=1e-9)
    share = share.where(usable(weights).all(-1, keepdim=True), 0.0)
    return (share * share * GATE_UNIT).long()


def even_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return counts [layers, experts] as multiples of their layer's mean."""
    return counts / np.maximum(counts.mean(1, keepdims=True), 1e-12)


def hottest(score: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the hottest experts of each layer: bool [layers, experts].

    ``places`` is the number of them in each layer; among equals the first win.
    """
    ranks = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1, kind="stable")
    return ranks < places[:, None]


def swaps(score: NDArray[np.float64], high: NDArray[np.bool_], places: int, margin: float) -> list[Swap]:
    """Return the changes that make the hottest experts of all layers high.

    The largest gain comes first.

    Args:
        score: float64 [layers, experts], hotness times the worth of the high version.
        high: bool [layers, experts], the high set now; at most ``places`` experts.
        places: number of high experts in all layers together.
        margin: least gain of a swap.
    """
    order = np.argsort(-score, axis=None, kind="stable")
    held, values = high.ravel(), score.ravel()
    coming = [at for at in order[:places].tolist() if not held[at] and values[at] > 0]
    going = [at for at in order[places:].tolist() if held[at]]  # the coldest last
    free = places - int(np.count_nonzero(high))
    found = []
    for at in coming:
        up = divmod(at, score.shape[1])
        if free > 0:
            free -= 1
            found.append(Swap(float(values[at]), up, None))
        elif going and (gain := float(values[at] - values[going[-1]])) > margin:
            found.append(Swap(gain, up, divmod(going.pop(), score.shape[1])))
    return sorted(found, key=lambda swap: -swap.gain)


def layer_swaps(
    score: NDArray[np.float64], high: NDArray[np.bool_], places: NDArray[np.int64], margin: float
) -> list[Swap]:
    """Return the changes that make each layer's hottest experts high.

    ``places``, int64 [layers], is the number of high experts of each layer; other arguments and the order are those of
    :func:`swaps`.
    """
    found = []
    for layer, (of_layer, held, count) in enumerate(zip(score, high, places.tolist(), strict=True)):
        for gain, up, down in swaps(of_layer[None], held[None], count, margin):
            found.append(Swap(gain, (layer, up[1]), None if down is None else (layer, down[1])))
    return sorted(found, key=lambda swap: -swap.gain)
