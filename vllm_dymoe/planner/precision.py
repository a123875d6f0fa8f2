"""The precision of an expert in one step."""

from enum import StrEnum


class Precision(StrEnum):
    """The precision of an expert in one step.

    Options say how many bits high and low have.
    """

    HIGH = "high"
    LOW = "low"
    SKIPPED = "skipped"
