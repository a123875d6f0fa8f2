"""What a cache that knows the future would read (Belady's MIN, with admission)."""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

Use = tuple[int, Sequence[int]]


def misses(uses: Sequence[Use], slots: int, first: int = 0) -> int:
    """How often an expert is not there, from use ``first`` on.

    A use is a layer, and the experts that it needs at once; the cache is empty in front of the first, and holds so many
    experts, of any layers; one that is needed later than all of them passes.
    """
    coming: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for time, (layer, experts) in enumerate(uses):
        for expert in experts:
            coming[layer, expert].append(time)
    held: dict[tuple[int, int], int] = {}
    farthest: list[tuple[int, tuple[int, int]]] = []  # a heap by next use, the last first; entries may be outdated
    found = 0
    for time, (layer, experts) in enumerate(uses):
        for expert in experts:
            key = layer, expert
            coming[key].popleft()
            found += key not in held and time >= first
            after = coming[key][0] if coming[key] else len(uses)
            held[key] = after
            heapq.heappush(farthest, (-after, key))
            while len(held) > slots:
                later, victim = heapq.heappop(farthest)
                if held.get(victim) == -later:
                    del held[victim]
    return found
