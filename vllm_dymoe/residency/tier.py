"""The precision an expert gets in one step."""

from enum import StrEnum


class Tier(StrEnum):
    """High, low, or skipped: how many bits each means is the configuration's."""

    HI = "hi"
    LO = "lo"
    SKIP = "skip"
