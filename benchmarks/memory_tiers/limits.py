"""Limits a process to a number of bytes of page cache, with its own control group."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_ROOT, _FIRST = Path("/sys/fs/cgroup"), "memory"
# A group's limit, its use, and the part of it for files, in both versions of control groups.
_NAMES = {
    "memory.max": ("memory.current", "file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "cache"),
}


def anonymous_bytes() -> int:
    """Return this process's memory that belongs to no file."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Limit:
    """Puts this process into a control group of its own.

    Args:
        files: are dropped from the page cache first; other files that the process has read count as theirs.
        nbytes: page cache, in addition to what the process holds when :meth:`hold` is called. None only counts what
            comes afterwards.
    """

    def __init__(self, files: Sequence[Path], nbytes: int | None) -> None:
        self._nbytes, self._before = nbytes, 0
        for path in files:  # pages left from writing them belong to other groups
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for root in (_ROOT, _ROOT / _FIRST):
            self._group = root / "dymoe-levels"
            with contextlib.suppress(OSError, StopIteration):
                self._group.mkdir(exist_ok=True)
                self._limit = next(name for name in _NAMES if (self._group / name).exists())
                (self._group / self._limit).write_text("max" if self._limit == "memory.max" else "-1")
                (self._group / "cgroup.procs").write_text(str(os.getpid()))
                return
        raise SystemExit(f"A control group for memory is needed, but none can be created in {_ROOT}; run this as root.")

    def hold(self) -> None:
        """Apply the limit from now on."""
        if self._nbytes is None:
            self._before = self.cached()
        else:
            other = int((self._group / _NAMES[self._limit][0]).read_text()) - self.cached()
            (self._group / self._limit).write_text(str(other + self._nbytes))

    def cached(self) -> int:
        """Return the bytes of page cache that the group uses."""
        lines = (line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        return int(dict(lines)[_NAMES[self._limit][1]]) - self._before
