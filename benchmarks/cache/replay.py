"""A cache of one layer, replayed over a routing: which of the experts that a step uses were there."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vllm_dymoe.residency.rule import HIGH, HIT, NOWHERE, STREAM, decide, record_uses

Routing = np.ndarray
"""int [steps, experts of a step], each expert once in a step."""

Replay = Callable[[Routing, int, int], int]
"""(routing, experts of the layer, slots) to hits."""


def least_recently_used(routing: Routing, experts: int, slots: int) -> int:
    """The victim is the expert that was used longest ago; every miss is kept."""
    used_at = np.full(experts, -1, np.int64)
    return _replay(
        routing,
        slots,
        lambda step, active: used_at.__setitem__(active, step),
        lambda step, among: min(among, key=lambda expert: used_at[expert]),
        lambda step, expert, victim: True,
    )


def heat(routing: Routing, experts: int, slots: int, *, admission: bool) -> int:
    """The plugin's own rule, with admission or without; a step of more experts than slots streams the others."""
    degrees, used_at = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
    held, wanted = np.zeros(experts, np.int8), np.full(routing.shape[1], HIGH, np.int8)
    hits = 0
    for step, active in enumerate(np.sort(routing, axis=1), start=1):
        record_uses(degrees, used_at, active, step)
        place = decide(active, wanted, held, degrees, used_at, (0, 0, slots), admission=admission)
        hits += np.count_nonzero(place == HIT)
        held[place[place >= 0]] = NOWHERE
        held[active[place != STREAM]] = HIGH
    return int(hits)


def belady(routing: Routing, experts: int, slots: int, *, admission: bool) -> int:
    """The optimum, which knows the future: the victim is the expert that is used again last."""
    never = len(routing)
    again = np.full((len(routing) + 1, experts), never)  # [step, expert]: the first use behind the step
    for step in range(len(routing) - 1, -1, -1):
        again[step] = again[step + 1]
        again[step, routing[step]] = step
    return _replay(
        routing,
        slots,
        lambda step, active: None,
        lambda step, among: max(among, key=lambda expert: again[step + 1, expert]),
        lambda step, expert, victim: not admission or again[step + 1, expert] < again[step + 1, victim],
        spare_active=not admission,
    )


POLICIES: dict[str, Replay] = {
    "LRU": least_recently_used,
    "heat": partial(heat, admission=False),
    "heat, admission": partial(heat, admission=True),
    "Belady": partial(belady, admission=False),
    "Belady, admission": partial(belady, admission=True),
}


def _replay(
    routing: Routing,
    slots: int,
    use: Callable[[int, list[int]], object],
    victim_of: Callable[[int, Sequence[int]], int],
    admit: Callable[[int, int, int], bool],
    *,
    spare_active: bool = True,
) -> int:
    """Hits of a cache: what a step uses is not evicted by the step, unless it has been read and may go at once."""
    kept: set[int] = set()
    hits = 0
    for step, row in enumerate(routing):
        active = sorted(row.tolist())
        use(step, active)
        hits += len(kept.intersection(active))
        for expert in active:
            if expert in kept:
                continue
            if len(kept) < slots:
                kept.add(expert)
                continue
            among = sorted(kept.difference(active) if spare_active else kept)
            if among and admit(step, expert, victim := victim_of(step, among)):
                kept.remove(victim)
                kept.add(expert)
    return hits
