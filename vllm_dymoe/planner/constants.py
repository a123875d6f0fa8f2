"""What decode on a device and its plain twins agree on."""

from enum import IntEnum


class Action(IntEnum):
    """What becomes of a slice's bytes in a step."""

    HIT = 0  # they are on the device
    ADMIT = 1  # they are fetched into a slot that keeps them
    STREAM = 2  # they are fetched for this step alone
    CPU = 3  # they stay in host memory, where the host computes with them
    SKIP = 4  # nothing is computed with them; of recorded actions only


SMALL_BATCH_ROWS = 16  # most rows of a small batch; with more of them tensor cores are worth a large one

LOW_VERSION = 8  # is added to a recorded action of an expert that was computed with its low version


class Cost(IntEnum):
    """Columns of :attr:`Table.cpu_costs`, for versions of a precision; nanoseconds unless said otherwise."""

    LINK = 0  # to bring the version, or the slice; of ABSENT: the way there and back of rows, whatever is computed
    FIRST_ROW = 1  # of the host for the version and one row; 0 if it never computes one
    NEXT_ROW = 2  # for each further row
    MOST_ROWS = 3  # of an expert that the host computes


NEVER_FETCHED = 1 << 40  # Cost.LINK of what is always computed by the CPU


POSITIONS_AT_ONCE = 2  # positions of an expert that are multiplied with each weight that is read

WEIGHT_UNIT = 1 << 40
"""Routing weights are summed as multiples of 1 / WEIGHT_UNIT, which all float32 from 2 ** -16 on are. Sums of 256 stay
below 2 ** 63 as long as weights stay below 2 ** 15. A pair that counts adds one more unit: a sum of 0 says that none
did."""

MOST_WEIGHT = 1 << 15  # a routing weight from here on, infinite or NaN counts in no statistic

AGING = 4  # score loses a share of 2 ** -AGING with each step: 16 steps are what it remembers
USE = 1 << 16  # score of one use; at most USE << AGING adds up


MOST_EXPERTS = 512  # experts of a layer for which a program decides: all of them are in one vector


def check_experts(experts: int) -> None:
    """ValueError for layers of more experts than a program holds."""
    if experts > MOST_EXPERTS:
        raise ValueError(f"a layer has {experts} experts, but a device decides for at most {MOST_EXPERTS}")


def experts_width(experts: int) -> int:
    """Elements of the vectors that a program has of a layer's experts: a power of two."""
    return max(32, 1 << (experts - 1).bit_length())


def scratch_size(tokens: int, top_k: int, experts: int) -> int:
    """Elements of a decision's scratch."""
    return 3 * experts_width(experts) + tokens * top_k
