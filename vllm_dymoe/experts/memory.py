"""How much host memory this process can still get, so that too little is a sentence and not the kernel's killer."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Limit and use of a container's memory: version 2 of control groups, then version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping: the machine's, or what a container's limit leaves of them."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _LIMITS:
        try:
            left = int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        available = min(available, max(0, left + _reclaimable((_CGROUP / limit).with_name("memory.stat"))))
    return available


def _reclaimable(statistics: Path) -> int:
    """Bytes of the page cache that the container's use counts, and that go when memory is short."""
    try:
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    except (OSError, ValueError):
        return 0
