"""The precision an expert gets in one step."""

from enum import StrEnum


class Precision(StrEnum):
    """High, low, or skipped: how many bits each means is the configuration's."""

    HIGH = "high"
    LOW = "low"
    SKIPPED = "skipped"
