"""Which experts a layer keeps on the device: one pure rule over integers, for one layer and one step.

*Heat* is integer ageing: each step of a layer takes a share of every expert's heat, and adds a fixed amount to that of
the experts it uses. The *victim* is the coldest expert, the one that was used longest ago among equals. It is
*admission* that an expert which is colder than every other is used without being kept. A step that needs more experts
than its layer may keep streams the rest and leaves the kept ones alone: one cache over all layers, or one that a prompt
fills, would be emptied by every prefill.

What is held, and nothing else, decides: not what was fetched ahead, nor when anything arrives. Everything is integer
arithmetic, so that a second writing, for a device, can give the same rows bit for bit. ``benchmarks/cache`` measures
the rule against least recently used and against the optimum.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.kernels.decode import AGING, USE

NOWHERE, LOW, HIGH = 0, 1, 2
"""In which version an expert is held, or wanted."""

HIT, STREAM, FREE = -3, -2, -1
"""An expert is there; comes and goes; takes a slot that its layer has left. From 0 on: takes that expert's place."""

_STEPS = 1 << 40  # more than a server can run: heat and step fit into one int64 that orders by both


def record_uses(heat: NDArray[np.int64], used_at: NDArray[np.int64], active: NDArray[np.int64], step: int) -> None:
    """Age a layer's heat by one step, and count what the step uses.

    Args:
        heat: int64 [experts], changed in place.
        used_at: int64 [experts], the step of each expert's last use, changed in place.
        active: experts that the step uses, each once.
        step: number of the step, larger than those before it and below 2 ** 40.
    """
    heat -= heat >> AGING
    heat[active] += USE
    used_at[active] = step


def decide(
    active: NDArray[np.int64],
    wanted: NDArray[np.int8],
    held: NDArray[np.int8],
    heat: NDArray[np.int64],
    used_at: NDArray[np.int64],
    shares: Sequence[int],
    *,
    reuse_high: bool = True,
    admission: bool = True,
) -> NDArray[np.int64]:
    """What becomes of each expert that a step uses (DyMoE 4.4.2: no duplication, promotion, conservative reuse).

    Args:
        active: int64 [n], the experts, ascending, counted by :func:`record_uses` already.
        wanted: int8 [n], LOW or HIGH for each of them.
        held: int8 [experts], NOWHERE, LOW or HIGH.
        heat: int64 [experts].
        used_at: int64 [experts].
        shares: experts that the layer may keep, by LOW and HIGH.
        reuse_high: whether a high version serves where a low one is wanted.
        admission: whether an expert colder than all that are kept is streamed.

    Returns:
        int64 [n]: HIT, STREAM, FREE, or the expert whose place is taken. An expert that is held in another version, and
        is to be kept, takes the place of that version as well.
    """
    has = held[active]
    hit = has >= wanted if reuse_high else has == wanted
    place = np.where(hit, HIT, STREAM)
    if hit.all():
        return place
    for tier in (HIGH, LOW):
        wanting = wanted == tier
        missing = (wanting & ~hit).nonzero()[0]
        if not len(missing):
            continue
        of_tier = held == tier
        superseded = np.count_nonzero((has == tier) & ~hit & (place != STREAM))
        free = max(0, shares[tier] - int(np.count_nonzero(of_tier)) + int(superseded))
        place[missing[:free]] = FREE
        if len(missing) <= free or np.count_nonzero(wanting) > shares[tier]:
            continue
        of_tier[active] = False
        victims = of_tier.nonzero()[0]
        victims = victims[np.argsort(heat[victims] * _STEPS + used_at[victims], kind="stable")].tolist()
        for number in missing[free:].tolist():
            if not victims:
                break
            if not admission or heat[active[number]] >= heat[victims[0]]:
                place[number] = victims.pop(0)
    return place


def coldest(heat: NDArray[np.int64], used_at: NDArray[np.int64], among: NDArray[np.int64]) -> int:
    """The expert to give up: the coldest, the one used longest ago among equals, the first of them if that is equal.

    Args:
        heat: int64 [experts].
        used_at: int64 [experts].
        among: experts that may be given up, at least one, ascending.
    """
    return int(among[np.argmin(heat[among] * _STEPS + used_at[among])])
