"""Constants and enumerations that the planners share."""

from enum import IntEnum


class Action(IntEnum):
    """What a step does about a slice's bytes."""

    HIT = 0  # they are in a slot
    ADMIT = 1  # fetch them into a slot of the layer, and keep them
    STREAM = 2  # fetch them for this step alone
    CPU = 3  # leave them in host memory; the CPU executes the expert
    SKIP = 4  # compute nothing; in recorded actions only


class Eviction(IntEnum):
    """Which of a layer's experts leaves first."""

    FIRST_IN = 0  # the one that came first: all scores are equal, and its last use is the step in which it came
    COLDEST = 1  # the one with the lowest score
    LEAST_RECENT = 2  # the one whose last use is longest ago (LRU): scores forget all but the running step


SMALL_BATCH_ROWS = 16  # most rows of a small batch; from 17 on tensor cores make a large batch worth it

LOW_VERSION = 8  # added to a recorded action if the expert was computed in its low version


class Cost(IntEnum):
    """Columns of :attr:`Table.cpu_costs`, for each version; in nanoseconds unless noted."""

    LINK = 0  # to fetch the version, or the slice; in the row ABSENT: a round trip to the CPU worker
    FIRST_ROW = 1  # CPU execution with one row; 0 if the CPU never executes the version
    NEXT_ROW = 2  # CPU execution of each further row
    MOST_ROWS = 3  # most rows (not ns) of an expert that the CPU executes


NEVER_FETCHED = 1 << 40  # Cost.LINK of versions that are always executed on the CPU


POSITIONS_AT_ONCE = 2  # positions of an expert that are computed each time a weight is read

WEIGHT_UNIT = 1 << 40
"""Routing weights are summed as integers, in units of 1 / WEIGHT_UNIT.

Every float32 from 2 ** -16 on is a multiple of that unit. Sums of 256 weights below 2 ** 15 stay below 2 ** 63. Each
pair that counts adds one more unit, so a sum of 0 means that no pair counted.
"""

MOST_WEIGHT = 1 << 15  # routing weights from here on, infinite ones and NaN count in no statistic

AGING = 4  # a score loses a share of 2 ** -AGING in each step, so it remembers about 16 steps
USE = 1 << 16  # score of one use; scores stay below USE << AGING


MOST_EXPERTS = 512  # of a layer, for a GPU planner: one program holds them in one vector


def check_experts(experts: int) -> None:
    """ValueError if a layer has more experts than a GPU planner can hold."""
    if experts > MOST_EXPERTS:
        raise ValueError(f"a layer has {experts} experts, but a device decides for at most {MOST_EXPERTS}")


def experts_width(experts: int) -> int:
    """Return the width of a GPU planner's vectors of experts, a power of two."""
    return max(32, 1 << (experts - 1).bit_length())


def scratch_size(tokens: int, top_k: int, experts: int) -> int:
    """Return the number of scratch elements of a plan."""
    return 3 * experts_width(experts) + tokens * top_k
