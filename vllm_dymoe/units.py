"""Numbers as text."""

from pydantic import ByteSize


def size(nbytes: float) -> str:
    """Return bytes with a unit: 1536 -> 1.5 KiB."""
    return ByteSize(nbytes).human_readable(separator=" ")


def too_small(needed: int, left: int) -> str:
    """Return a sentence about a disk with less room than ``needed`` bytes.

    It contains the difference, because both numbers may look alike.
    """
    return f"needs {size(needed)}, but its disk has {size(left)} left ({size(needed - left)} too little)"
