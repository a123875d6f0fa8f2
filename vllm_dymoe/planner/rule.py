"""The planner's specification: a layer's decisions in one step.

What a layer does with the experts of a step is a pure function of integers.

- The *score* of an expert is an aged use count: each step of the layer subtracts a share of every score, and adds a
  fixed amount for the experts that it uses.
- A miss takes a free slot, if there is one, and is admitted.
- Otherwise it may evict the *victim*: the coldest expert that the step does not use, among equals the least recently
  used. If the miss is colder than every victim, it is streamed.
- If a step needs more experts than the layer's quota, the hottest are admitted first, so that a prompt or a large batch
  does not empty the cache.
- The coldest misses are executed on the CPU, as many as the CPU finishes before the link has brought the others. A miss
  that finds a free slot is always fetched. What was fetched ahead does not have to cross the link any more.

Nothing else depends on what was prefetched, or on when anything arrives. Everything is integer arithmetic, so the other
writings, ``kernels/cpu/planner.h`` and ``kernels/triton/planner.py``, give the same results bit for bit. Their common
constants are in ``constants``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_dymoe.planner.constants import AGING, LOW_VERSION, NEVER_FETCHED, PROJECTIONS, USE, Action, Cost

ABSENT, LOW, HIGH = 0, 1, 2  # the version in which an expert is held or wanted

CPU, HIT, STREAM, FREE = -4, -3, -2, -1
"""Place of a slice: executed on the CPU; in a slot already; streamed; admitted to a free slot. A number from 0 on means
that the slice is admitted to the slot of that expert, which is evicted.
"""

Ints = NDArray[np.int64]

_STEPS = 1 << 40  # more steps than a server can run, so score and step fit into one int64 that orders by both


def record_uses(
    score: Ints, used_at: Ints, active: Ints, wanted: NDArray[np.int8], step: int, aging: int = AGING
) -> None:
    """Age a layer's scores by one step and count its uses.

    Changes ``score`` and ``used_at`` in place.

    Args:
        score: int64 [slices, experts].
        used_at: int64 [slices, experts], the step of each one's last use.
        active: experts that the step uses, each once.
        wanted: LOW or HIGH for each of them; with two slices LOW uses only the first one.
        step: number of the step, larger than those before it and below 2 ** 40.
        aging: each step subtracts a share of 2 ** -aging; 0 forgets everything, so that only the last use orders
            experts.
    """
    score -= score >> aging
    for number in range(len(score)):
        uses = active if number == 0 else active[wanted == HIGH]
        score[number, uses] += USE
        used_at[number, uses] = step


def decide(
    active: Ints,  # int64 [n], the experts, ascending; :func:`record_uses` has counted them
    wanted: NDArray[np.int8],  # int8 [n], LOW or HIGH for each of them
    held: NDArray[np.int8],  # int8 [experts], ABSENT, LOW or HIGH
    score: Ints,  # int64 [slices, experts], as is used_at
    used_at: Ints,
    quotas: Sequence[int],  # slots of the layer, by LOW and HIGH
    *,
    reuse_high: bool = True,
    admits: bool = True,
    rows: Ints | None = None,  # int64 [n], rows of each expert; None for no CPU execution
    costs: Ints | None = None,  # int64 [3, 4], by precision and Cost
    ahead: Ints | None = None,  # int64 [slices, n], projections that were fetched ahead; None for none
) -> Ints:
    """Decide the place of each expert that a step uses.

    The rules are DyMoE's (4.4.2: no duplication, promotion, conservative reuse). Separate versions are one slice: an
    expert that is admitted in another version than it is held in gives up the old one. Nested versions are two slices:
    a residual slice needs its base, is kept only with it, and is evicted with it.

    Args:
        reuse_high: whether a high version serves where a low one is wanted; with two slices it always does.
        admits: whether misses may be kept; otherwise a migration writes the rows (DynaExq), and every miss is streamed
            or executed on the CPU.

    Returns:
        int64 [slices, n]: CPU for all slices, or HIT, STREAM, FREE, or the expert whose slot is taken. A slice that is
        not wanted counts as HIT.
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
        free = quotas if admits else (0, 0, 0)
        left = PROJECTIONS - (np.zeros_like(places) if ahead is None else ahead)
        on_cpu = _executed_on_cpu(hit, score[0][active], wanted, held, rows, free, costs, left)
        fetched, places[:, on_cpu] = fetched & ~on_cpu, CPU
    if not admits:
        return places
    if len(score) == 1:
        for precision, wanting in ((HIGH, high), (LOW, ~high)):
            kept = held == precision
            kept[active[fetched[0] & (places[0] != STREAM)]] = False  # replaced by their other version
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
    """Return the action of each pair's expert: uint8 [tokens, top_k].

    LOW_VERSION is added to an Action if the expert is computed low.

    Args:
        ids: int64 [tokens, top_k], negative where another rank has the expert.
        active: as for :func:`decide`, as are wanted and held.
        places: the result of :func:`decide`.
    """
    # The last element is for other ranks' experts.
    hit, found = (places == HIT).all(0), np.full(int(ids.max()) + 2, Action.SKIP, np.uint8)
    cases = (places == CPU).any(0), hit, (places == STREAM).any(0)
    low = (wanted == LOW) & ~(hit & (held[active] == HIGH))
    found[active] = np.select(cases, (Action.CPU, Action.HIT, Action.STREAM), Action.ADMIT) + LOW_VERSION * low
    return found[ids]


def _executed_on_cpu(
    hit: NDArray[np.bool_], score: Ints, wanted: NDArray[np.int8], held: NDArray[np.int8], rows: Ints,
    quotas: Sequence[int], costs: Ints, left: Ints,
) -> NDArray[np.bool_]:  # fmt: skip
    """Return which experts the CPU executes, bool [n].

    Each expert that moves from the link to the CPU shortens the link's time and lengthens the CPU's. The longer of the
    two is shortest where they meet, when the link brings B_link / (B_link + B_cpu) of the bytes. The hottest misses are
    fetched, because they will be kept.

    Args:
        hit: bool [slices, n], slices that are resident or not wanted.
        score: int64 [n], of the step's experts; the other arguments are as for :func:`decide`.
        left: int64 [slices, n], projections that have not been fetched ahead.
    """
    link, cost = np.zeros(len(score), np.int64), costs[wanted]
    may = (cost[:, Cost.FIRST_ROW] > 0) & (rows <= cost[:, Cost.MOST_ROWS])
    low, kept = ~hit[0], held != ABSENT
    if len(hit) == 1:
        low, kept = low & (wanted == LOW), held == LOW
    for precision, lacks, has in ((LOW, low, kept), (HIGH, ~hit[-1] & (wanted == HIGH), held == HIGH)):
        lacking = lacks.nonzero()[0]
        if len(lacking):
            part = left[precision - LOW if len(hit) > 1 else 0, lacking]
            link[lacking] += costs[precision, Cost.LINK] * part // PROJECTIONS
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
    place: Ints,  # int64 [n], places of the active experts; changed where one is found
    active: Ints,
    wanting: NDArray[np.bool_],  # bool [n], experts that use this kind of slot
    missing: NDArray[np.bool_],  # bool [n], experts that need a slot
    kept: NDArray[np.bool_],  # bool [experts], experts that have one; overwritten
    score: Ints,
    used_at: Ints,
    quota: int,  # slots of the layer
) -> None:
    """Give misses of one kind the free slots, and then the slots of colder experts."""
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
    """Return the expert of ``among`` to evict.

    The coldest is evicted, among equals the least recently used, then the first.
    """
    return int(among[np.argmin(score[among] * _STEPS + used_at[among])])
