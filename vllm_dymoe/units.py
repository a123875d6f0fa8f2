"""Numbers for people."""

from pydantic import ByteSize


def size(nbytes: float) -> str:
    """Bytes with a unit: 1536 -> 1.5 KiB."""
    return ByteSize(nbytes).human_readable(separator=" ")


def too_small(needed: int, left: int) -> str:
    """Of a disk with less room than ``needed`` bytes; the difference is said because both may look alike."""
    return f"needs {size(needed)}, but its disk has {size(left)} left ({size(needed - left)} too little)"
