"""The precision of an expert in one step."""

from enum import StrEnum


class Precision(StrEnum):
    """High, low or skipped; the options say how many bits each one has."""

    HIGH = "high"
    LOW = "low"
    SKIPPED = "skipped"
