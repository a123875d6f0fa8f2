"""Which experts are hot over long stretches of traffic, and which of them are to be high (DynaExq 3.5). Pure functions.

Hotness is an exponential average over windows of time. It counts in even shares: an expert that gets what all would get
if routers had no favourites has hotness 1, whatever the model's size and however many tokens a window had. What an
expert gets is its uses (the paper), or the squares of its shares of tokens' routing weights: the error that a low
version adds to an output grows with that share, and so its square with the square.

One thing keeps sets from oscillating, a *margin*: an expert that comes in is hotter by more than that than the one that
goes. Ranks of slack and windows that had to agree, beside it, kept sets from following (benchmarks/LOG.md).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.planner.constants import MOST_WEIGHT

GATE_UNIT = 1 << 20

Place = tuple[int, int]  # layer and expert


class Swap(NamedTuple):
    """One move of a plan."""

    gain: float  # by how much the expert that comes in is hotter
    up: Place  # the expert that becomes high
    down: Place | None  # the one that becomes low, perhaps of another layer; None if there is a place that is free


def averaged(score: NDArray[np.float64], counts: NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """Hotness, float64 [layers, experts] in even shares, with counts int64 of one more window, of weight alpha. Layers
    that counted nothing keep what is known; one of which nothing is known, zeros, takes the window for itself."""
    shares, known = even_shares(counts), score.any(1, keepdims=True)
    return np.where(counts.any(1, keepdims=True), np.where(known, score + alpha * (shares - score), shares), score)


def usable(weights: Tensor) -> Tensor:
    """Which routing weights count in a statistic: bool likewise. NaN, infinite and absurd ones, which a request's own
    numbers may give, must not decide how later requests are served."""
    return weights.abs() < MOST_WEIGHT


def squared_gates(weights: Tensor) -> Tensor:
    """Of each choice, with weights [..., top_k], the square of its share of its token's routing weights in units of 1 /
    GATE_UNIT: int64, whole numbers, since the order of additions must not decide on which rank an expert is hot. A
    token of which a weight is not usable has zeros."""
    exact = weights.double()  # so that no order of additions shows
    share = exact / exact.sum(-1, keepdim=True).clamp(min=1e-9)
    share = share.where(usable(weights).all(-1, keepdim=True), 0.0)
    return (share * share * GATE_UNIT).long()


def even_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [layers, experts] as multiples of their layer's mean."""
    return counts / np.maximum(counts.mean(1, keepdims=True), 1e-12)


def hottest(score: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The top n of each layer, the first among equals: bool like scores [layers, experts], with n int64 [layers]."""
    ranks = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1, kind="stable")
    return ranks < places[:, None]


def swaps(score: NDArray[np.float64], high: NDArray[np.bool_], places: int, margin: float) -> list[Swap]:
    """The moves from the set that is high to the hottest ones of all layers, what is worth most first.

    Args:
        score: float64 [layers, experts], hotness times what high versions are worth.
        high: bool [layers, experts], at most as many as there are places.
        places: high experts of all layers.
        margin: by which an expert that comes in is to be hotter than the one that goes.
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
