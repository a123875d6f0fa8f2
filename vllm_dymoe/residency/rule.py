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

from vllm_dymoe.residency.constants import AGING, USE

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
        kept = held == tier
        kept[active[~hit & (place != STREAM)]] = False  # superseded by their other version
        _find_places(place, active, wanting, wanting & ~hit, kept, heat, used_at, shares[tier], admission)
    return place


def decide_slices(
    active: NDArray[np.int64],
    wanted: NDArray[np.int8],
    held: NDArray[np.int8],
    heat: Sequence[NDArray[np.int64]],
    used_at: Sequence[NDArray[np.int64]],
    shares: Sequence[int],
    *,
    admission: bool = True,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same where the low version lies inside the high one: what becomes of each expert's base and fine slice.

    A fine slice needs its base: it is kept only with it, and loses its place with it. An expert that is held low and
    wanted high gets the fine slice alone.

    Args:
        active: as in :func:`decide`, like the others.
        wanted: LOW needs the base, HIGH both slices.
        held: LOW if the base is there, HIGH if both are.
        heat: two int64 [experts]: of uses of the base, and of the fine slice.
        used_at: the same.
        shares: slices that the layer may keep: bases at LOW, fine ones at HIGH.
        admission: as in :func:`decide`.

    Returns:
        Two int64 [n], for bases and fine slices: HIT, STREAM, FREE, or the expert whose place is taken. A fine slice
        that is not wanted counts as HIT.
    """
    has = held[active]
    base = np.where(has != NOWHERE, HIT, STREAM)
    _find_places(
        base, active, base == base, base == STREAM, held != NOWHERE, heat[0], used_at[0], shares[LOW], admission
    )
    whole = held == HIGH
    whole[base[base >= 0]] = False
    wanting = wanted == HIGH
    fine = np.where(wanting & (has != HIGH), STREAM, HIT)
    missing = (fine == STREAM) & (base != STREAM)
    _find_places(fine, active, wanting, missing, whole, heat[1], used_at[1], shares[HIGH], admission)
    return base, fine


def _find_places(
    place: NDArray[np.int64],
    active: NDArray[np.int64],
    wanting: NDArray[np.bool_],
    missing: NDArray[np.bool_],
    kept: NDArray[np.bool_],
    heat: NDArray[np.int64],
    used_at: NDArray[np.int64],
    share: int,
    admission: bool,
) -> None:
    """Give what is missing of one kind the places that are free, and then those of colder experts.

    Args:
        place: int64 [n], changed where one is found.
        active: int64 [n], the experts.
        wanting: bool [n], who uses this kind: if these are more than the share, the rest is streamed.
        missing: bool [n], who looks for a place.
        kept: bool [experts], who has one.
        heat: int64 [experts].
        used_at: int64 [experts].
        share: places that the layer has.
        admission: whether a colder expert than all that are kept finds none.
    """
    looking = missing.nonzero()[0]
    if not len(looking):
        return
    free = max(0, share - int(np.count_nonzero(kept)))
    place[looking[:free]] = FREE
    if len(looking) <= free or np.count_nonzero(wanting) > share:
        return
    others = kept.copy()
    others[active] = False
    victims = others.nonzero()[0]
    victims = victims[np.argsort(heat[victims] * _STEPS + used_at[victims], kind="stable")].tolist()
    for number in looking[free:].tolist():
        if not victims:
            break
        if not admission or heat[active[number]] >= heat[victims[0]]:
            place[number] = victims.pop(0)


def coldest(heat: NDArray[np.int64], used_at: NDArray[np.int64], among: NDArray[np.int64]) -> int:
    """The expert to give up: the coldest, the one used longest ago among equals, the first of them if that is equal.

    Args:
        heat: int64 [experts].
        used_at: int64 [experts].
        among: experts that may be given up, at least one, ascending.
    """
    return int(among[np.argmin(heat[among] * _STEPS + used_at[among])])
