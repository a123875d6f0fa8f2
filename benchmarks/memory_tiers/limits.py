"""Holding a process to a number of bytes of page cache, by a control group of its own."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_ROOT, _FIRST = Path("/sys/fs/cgroup"), "memory"
# A group's limit, what it uses, and what of that is files, in both versions of control groups.
_NAMES = {
    "memory.max": ("memory.current", "file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "cache"),
}


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


class Limit:
    """This process in a control group, until it ends.

    Args:
        files: that nothing is cached of at first; what else the process has read counts as theirs.
        nbytes: of page cache beside what the process has otherwise when :meth:`hold` is called; None to watch only,
            and to count what comes after that.
    """

    def __init__(self, files: Sequence[Path], nbytes: int | None) -> None:
        self._nbytes, self._before = nbytes, 0
        for path in files:  # what writing them has left belongs to other groups
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
        raise SystemExit(f"A control group for memory is needed, and none may be made below {_ROOT}; run this as root.")

    def hold(self) -> None:
        """From now on."""
        if self._nbytes is None:
            self._before = self.cached()
        else:
            other = int((self._group / _NAMES[self._limit][0]).read_text()) - self.cached()
            (self._group / self._limit).write_text(str(other + self._nbytes))

    def cached(self) -> int:
        """Bytes of page cache that the group has."""
        lines = (line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        return int(dict(lines)[_NAMES[self._limit][1]]) - self._before
