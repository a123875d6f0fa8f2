"""Constants and enumerations that the planners share."""

from enum import IntEnum


class Action(IntEnum):
    """What a step does with a slice's bytes."""

    HIT = 0  # use them from a slot
    ADMIT = 1  # fetch them into a slot of the layer, and keep them
    STREAM = 2  # fetch them for this step only
    CPU = 3  # leave them in host memory; the CPU executes the expert
    SKIP = 4  # compute nothing; used in recorded actions only


class Eviction(IntEnum):
    """Which of a layer's experts is evicted first."""

    FIRST_IN = 0  # the one that came first: all scores are equal, and its last use is the step in which it came
    COLDEST = 1  # the one with the lowest score
    LEAST_RECENT = 2  # the one not used for the longest time (LRU): scores forget everything before the running step


SMALL_BATCH_ROWS = 16  # most rows of a small batch; from 17 rows on tensor cores make a large batch faster

LOW_VERSION = 8  # added to a recorded action if the expert was computed in its low version


class Cost(IntEnum):
    """Columns of :attr:`Table.cpu_costs`, for each version.

    Values are in nanoseconds unless noted.
    """

    LINK = 0  # to fetch the version, or the slice; in the row ABSENT: a round trip to the CPU worker
    FIRST_ROW = 1  # CPU execution with one row; 0 if the CPU never executes the version
    NEXT_ROW = 2  # CPU execution of each further row
    MOST_ROWS = 3  # most rows (not ns) of an expert that the CPU executes


NEVER_FETCHED = 1 << 40  # Cost.LINK of versions that the CPU always executes

PROJECTIONS = 3  # of an expert: gate, up and down


POSITIONS_AT_ONCE = 2  # positions of an expert that are computed for each read of a weight

WEIGHT_UNIT = 1 << 40
"""Number of units in a routing weight of 1; weights are summed as integers.

Every float32 from 2 ** -16 on is a multiple of a unit. Sums of 256 weights below 2 ** 15 stay below 2 ** 63. Each pair
that counts adds one more unit, so a sum of 0 means that no pair counted.
"""

MOST_WEIGHT = 1 << 15  # larger routing weights, infinite ones and NaN are left out of statistics

AGING = 4  # each step subtracts a share of 2 ** -AGING from a score, so it remembers about 16 steps
USE = 1 << 16  # what one use adds to a score; scores stay below USE << AGING


MOST_EXPERTS = 1024  # most experts of a layer for a GPU planner, whose single program holds them in one vector


GLOBAL_IDS = "global_ids are needed if precision is chosen among the experts of all ranks, and only then"


def check_experts(experts: int) -> None:
    """Raise ValueError if a layer has more experts than a GPU planner can hold."""
    if experts > MOST_EXPERTS:
        raise ValueError(f"a layer has {experts} experts, but device-side planning supports at most {MOST_EXPERTS}")


def experts_width(experts: int) -> int:
    """Return the width of a GPU planner's vectors of experts, a power of two."""
    return max(32, 1 << (experts - 1).bit_length())


def scratch_size(tokens: int, top_k: int, experts: int) -> int:
    """Return the number of scratch elements of a plan."""
    return 3 * experts_width(experts) + tokens * top_k
