"""Numbers for people."""


def size(nbytes: float) -> str:
    """Bytes with a unit: 1536 -> 1.5 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
