"""Numbers for people."""


def size(nbytes: float) -> str:
    """Bytes with a unit: 1536 -> 1.5 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        shown = f"{value:.0f}" if unit == "B" else f"{value:.1f}"
        if float(shown) < 1024:
            return f"{shown} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def too_small(needed: int, left: int) -> str:
    """Of a disk with less room than ``needed`` bytes; the difference is said because both may look alike."""
    return f"needs {size(needed)}, but its disk has {size(left)} left ({size(needed - left)} too little)"
