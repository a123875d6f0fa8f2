"""Which experts a layer keeps on the device: one pure rule over integers, for one layer and one step.

*Score* is integer ageing: each step of a layer takes a share of every expert's score, and adds a fixed amount to that
of the experts it uses. The *victim* is the coldest expert that the step does not use, of equals the one used longest
ago. *Admission* means that an expert which is colder than every victim is used without being kept. In a step that needs
more experts than its layer may keep the hottest come first, so that a prompt, or a large batch, does not empty the
cache. *There* an expert is computed that is neither held nor fetched: the coldest misses, one after the other, as long
as the host ends with them before the link with the others. What finds a free place is always fetched.

What is held, and nothing else, decides: not what was fetched ahead, nor when anything arrives. Everything is integer
arithmetic, so that the second writing, ``kernels/triton/planner.py``, gives the same rows bit for bit. Constants of
both are in ``constants``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.constants import AGING, LOW_VERSION, NEVER_FETCHED, USE, Action, Cost

ABSENT, LOW, HIGH = 0, 1, 2  # in which version an expert is held, or wanted

CPU, HIT, STREAM, FREE = -4, -3, -2, -1
"""An expert is computed by the CPU in host memory; a slice has a slot; comes for this step alone; takes a slot that
its layer has left. From 0 on: takes that expert's."""

Ints = NDArray[np.int64]

_STEPS = 1 << 40  # more than a server can run: score and step fit into one int64 that orders by both


def record_uses(score: Ints, used_at: Ints, active: Ints, wanted: NDArray[np.int8], step: int) -> None:
    """Age a layer's score by one step, and count what the step uses; both arrays are changed in place.

    Args:
        score: int64 [slices, experts].
        used_at: int64 [slices, experts], the step of each one's last use.
        active: experts that the step uses, each once.
        wanted: LOW or HIGH for each of them: where there are two slices LOW uses the first one alone.
        step: number of the step, larger than those before it and below 2 ** 40.
    """
    score -= score >> AGING
    for number in range(len(score)):
        uses = active if number == 0 else active[wanted == HIGH]
        score[number, uses] += USE
        used_at[number, uses] = step


def decide(
    active: Ints,  # int64 [n], the experts, ascending, counted by :func:`record_uses` already
    wanted: NDArray[np.int8],  # int8 [n], LOW or HIGH for each of them
    held: NDArray[np.int8],  # int8 [experts], ABSENT, LOW or HIGH
    score: Ints,  # int64 [slices, experts]; used_at likewise
    used_at: Ints,
    quotas: Sequence[int],  # versions, or slices, that the layer may keep, by LOW and HIGH
    *,
    reuse_high: bool = True,
    rows: Ints | None = None,  # int64 [n], of each expert; None where nothing is computed by the CPU
    costs: Ints | None = None,  # int64 [3, 4], by precision and Cost
) -> Ints:
    """What becomes of each expert that a step uses (DyMoE 4.4.2: no duplication, promotion, conservative reuse).

    It is int64 [slices, n]: CPU for all slices, or HIT, STREAM, FREE, or the expert whose place is taken. A slice that
    is not wanted counts as HIT.

    Versions that exclude each other are one slice, and an expert that is to be kept in another version than it has
    takes the place of that one as well. Where the low version lies inside the high one there are two slices: a fine
    slice needs its base, is kept only with it, and loses its place with it.

    Args:
        reuse_high: whether a high version serves where a low one is wanted; it always does where there are two slices.
    """
    has = held[active]
    if len(score) == 1:
        hit = (has >= wanted if reuse_high else has == wanted)[None]
    else:
        hit = np.stack((has != ABSENT, (has == HIGH) | (wanted == LOW)))
    places = np.where(hit, HIT, STREAM)
    if hit.all():
        return places
    high, fetched = wanted == HIGH, ~hit
    if rows is not None and costs is not None and costs[:, Cost.FIRST_ROW].any():
        on_cpu = _executed_on_cpu(hit, score[0][active], wanted, held, rows, quotas, costs)
        fetched, places[:, on_cpu] = fetched & ~on_cpu, CPU
    if len(score) == 1:
        for precision, wanting in ((HIGH, high), (LOW, ~high)):
            kept = held == precision
            kept[active[fetched[0] & (places[0] != STREAM)]] = False  # superseded by their other version
            _find_places(
                places[0], active, wanting, wanting & fetched[0], kept, score[0], used_at[0], quotas[precision]
            )
        return places
    base, residual = places
    _find_places(base, active, wanted != ABSENT, fetched[0], held != ABSENT, score[0], used_at[0], quotas[LOW])
    whole = held == HIGH
    whole[base[base >= 0]] = False
    _find_places(residual, active, high, fetched[1] & (base != STREAM), whole, score[1], used_at[1], quotas[HIGH])
    return places


def actions_of(
    ids: Ints, active: Ints, wanted: NDArray[np.int8], held: NDArray[np.int8], places: Ints
) -> NDArray[np.uint8]:
    """What becomes of the expert of each pair: a Action, and LOW_VERSION where it is computed low.

    Args:
        ids: int64 [tokens, top_k], negative where another rank has the expert.
        active: as for :func:`decide`; wanted and held likewise.
        places: what that returned.
    """
    hit, found = (places == HIT).all(0), np.full(int(ids.max()) + 2, Action.SKIP, np.uint8)  # the last of other ranks
    cases = (places == CPU).any(0), hit, (places == STREAM).any(0)
    low = (wanted == LOW) & ~(hit & (held[active] == HIGH))
    found[active] = np.select(cases, (Action.CPU, Action.HIT, Action.STREAM), Action.ADMIT) + LOW_VERSION * low
    return found[ids]


def _executed_on_cpu(
    hit: NDArray[np.bool_], score: Ints, wanted: NDArray[np.int8], held: NDArray[np.int8], rows: Ints,
    quotas: Sequence[int], costs: Ints,
) -> NDArray[np.bool_]:  # fmt: skip
    """Which experts the host computes where they lie.

    With each one more the link has less to bring and the host more to do; the longer of the two is shortest where they
    meet, which is at B_link / (B_link + B_cpu) of the bytes. The hottest are fetched, because they will be kept.

    Of the step's experts are ``hit``, bool [slices, n], which have what they need, and ``score``, int64 [n]; all else
    is as for :func:`decide`.
    """
    link, cost = np.zeros(len(score), np.int64), costs[wanted]
    may = (cost[:, Cost.FIRST_ROW] > 0) & (rows <= cost[:, Cost.MOST_ROWS])
    low, kept = ~hit[0], held != ABSENT
    if len(hit) == 1:
        low, kept = low & (wanted == LOW), held == LOW
    for precision, lacks, has in ((LOW, low, kept), (HIGH, ~hit[-1] & (wanted == HIGH), held == HIGH)):
        lacking = lacks.nonzero()[0]
        if len(lacking):
            link[lacking] += costs[precision, Cost.LINK]
            may[lacking[: max(0, quotas[precision] - int(np.count_nonzero(has)))]] = False
    may &= link > 0
    if (link[may] >= NEVER_FETCHED).all():
        return may
    host = cost[:, Cost.FIRST_ROW] + (rows - 1) * cost[:, Cost.NEXT_ROW]
    candidates = may.nonzero()[0]
    candidates = candidates[np.argsort(score[candidates], kind="stable")]
    longer = link.sum() - np.cumsum(link[candidates]) + link[candidates]
    fits = costs[ABSENT, Cost.LINK] + np.cumsum(host[candidates]) < longer
    on_cpu = np.zeros(len(score), np.bool_)
    on_cpu[candidates[: len(fits) if fits.all() else int(fits.argmin())]] = True
    return on_cpu


def _find_places(
    place: Ints,  # int64 [n], of the active experts, changed where one is found
    active: Ints,
    wanting: NDArray[np.bool_],  # bool [n], which of them use this kind
    missing: NDArray[np.bool_],  # bool [n], which of them look for a place
    kept: NDArray[np.bool_],  # bool [experts], which experts have one
    score: Ints,
    used_at: Ints,
    quota: int,  # places that the layer has
) -> None:
    """Give what is missing of one kind the places that are free, and then those of colder experts."""
    looking = missing.nonzero()[0]
    if not len(looking):
        return
    free = max(0, quota - int(np.count_nonzero(kept)))
    place[looking[:free]] = FREE
    looking = looking[free:]
    if np.count_nonzero(wanting) > quota:
        looking = looking[np.argsort(-score[active[looking]], kind="stable")]  # the hottest first
    kept[active] = False
    victims = kept.nonzero()[0]
    victims = victims[np.argsort(score[victims] * _STEPS + used_at[victims], kind="stable")].tolist()
    for number in looking.tolist():
        if not victims:
            break
        if score[active[number]] >= score[victims[0]]:
            place[number] = victims.pop(0)


def coldest(score: Ints, used_at: Ints, among: Ints) -> int:
    """The expert to give up among some, ascending: the coldest, among equals the one used longest ago, then the
    first."""
    return int(among[np.argmin(score[among] * _STEPS + used_at[among])])
