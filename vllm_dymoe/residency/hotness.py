"""Which experts are hot over long stretches of traffic, and which of them are to be high (DynaExq 3.5). Pure functions.

Hotness is an exponential average over windows of time. It counts in even shares: an expert that gets what all would get
if routers had no favourites has hotness 1, whatever the model's size and however many tokens a window had. What an
expert gets is its uses (the paper), or the squares of its shares of tokens' routing weights: the error that a low
version adds to an output grows with that share, and so its square with the square.

Three things keep sets from oscillating. A *margin*: an expert that comes in is hotter by more than that than one that
goes. A *slack*: a high expert stays as long as it is among the n + slack hottest. And *two windows*: a swap needs that
the last window and the one before want it both, each by itself. Traffic that alternates between two mixes then swaps no
pair twice.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GATE_UNIT = 1 << 20


class Swap(NamedTuple):
    """One move of a plan."""

    gain: float  # by how much the expert that comes in is hotter
    layer: int  # of both
    up: int  # the expert that becomes high
    down: int | None  # the one that becomes low; None if the layer has a place that is free


@dataclass(frozen=True)
class Rule:
    """How hotness is averaged and sets are chosen."""

    alpha: float  # weight of the last window, above 0 and up to 1
    margin: float  # in even shares
    slack: int  # in ranks


@dataclass(frozen=True)
class Hotness:
    """What is known at the end of a window; float64 [layers, experts], in even shares."""

    score: NDArray[np.float64]  # the average over windows
    last: NDArray[np.float64]  # of the last window alone
    before: NDArray[np.float64]  # of the window before it

    @classmethod
    def of(cls, counts: NDArray[np.int64]) -> Self:
        """From the counts of one stretch of traffic, int64 [layers, experts]; no expert is hot where all are 0."""
        shares = even_shares(counts)
        return cls(shares, shares, shares)

    def after(self, counts: NDArray[np.int64], rule: Rule) -> "Hotness":
        """Average in one more window. A layer that counted nothing keeps what is known."""
        shares, seen = even_shares(counts), counts.any(1, keepdims=True)
        known = self.score.any(1, keepdims=True)  # the first window stands for itself
        score = np.where(known, self.score + rule.alpha * (shares - self.score), shares)
        before = np.where(known, self.last, shares)
        return replace(
            self,
            score=np.where(seen, score, self.score),
            last=np.where(seen, shares, self.last),
            before=np.where(seen, before, self.before),
        )


def squared_gates(weights: Tensor) -> Tensor:
    """Of each choice, the square of its share of its token's routing weights in units of 1 / GATE_UNIT.

    Whole numbers, since the order of additions must not decide on which rank an expert is hot.

    Args:
        weights: [..., top_k].

    Returns:
        int64, of the same shape.
    """
    share = weights.float() / weights.float().sum(-1, keepdim=True).clamp(min=1e-9)
    return (share * share * GATE_UNIT).long()


def even_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts [layers, experts] as multiples of their layer's mean."""
    return counts / np.maximum(counts.mean(1, keepdims=True), 1e-12)


def hottest(score: NDArray[np.float64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The top n of each layer; the first among equals.

    Args:
        score: float64 [layers, experts].
        places: int64 [layers], n.

    Returns:
        bool [layers, experts].
    """
    ranks = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1, kind="stable")
    return ranks < places[:, None]


def share_out(score: NDArray[np.float64], places: int) -> NDArray[np.int64]:
    """Places of each layer, so that high experts get as much as they can; int64 [layers].

    Every layer routes the same tokens, so that a place is worth the share of its layer's traffic that comes with it,
    times what high versions are worth in that layer.

    Args:
        score: float64 [layers, experts], that product.
        places: of all layers.
    """
    order = np.argsort(-score, axis=None, kind="stable")[:places]
    return np.bincount(order // score.shape[1], minlength=score.shape[0])


def swaps(hotness: Hotness, high: NDArray[np.bool_], places: NDArray[np.int64], rule: Rule) -> list[Swap]:
    """The moves from the sets that are high to those that are to be, what is worth most first.

    Args:
        high: bool [layers, experts], at most as many of a layer as it has places.
        places: int64 [layers], high experts that each layer can have.
    """
    found: list[Swap] = []
    for layer in range(len(high)):
        found += _layer_swaps(layer, hotness, high[layer], int(places[layer]), rule)
    return sorted(found, key=lambda swap: -swap.gain)


def _layer_swaps(layer: int, hotness: Hotness, high: NDArray[np.bool_], places: int, rule: Rule) -> list[Swap]:
    score, last, before = hotness.score[layer], hotness.last[layer], hotness.before[layer]
    order = np.argsort(-score, kind="stable")
    coming = [expert for expert in order[:places].tolist() if not high[expert] and score[expert] > 0]
    going = order[places + rule.slack :]
    going = going[high[going]][::-1]  # the coldest first
    found = []
    free = places - int(np.count_nonzero(high))
    for up in coming:
        if free > 0:
            free -= 1
            found.append(Swap(float(score[up]), layer, up, None))
            continue
        agreed = (score[up] > score[going] + rule.margin) & (last[up] > last[going]) & (before[up] > before[going])
        if not agreed.any():
            continue
        place = int(agreed.argmax())
        down = int(going[place])
        going = np.delete(going, place)
        found.append(Swap(float(score[up] - score[down]), layer, up, down))
    return found
