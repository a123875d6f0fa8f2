"""Holding page cache to a number of bytes without a control group: what is above it is given back, piece by piece.

A kernel under ``memory.max`` gives back what was used longest ago, as far as it knows; here it is a random piece, which
costs a few per cent of hits, and no more pieces than are too many. It is the same for everything that is measured with
the page cache.
"""

import ctypes
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

_PIECE = 256 << 10
_CACHESTAT = 451  # the same number on all machines; Linux 6.5
_MADV_PAGEOUT = 21
_libc = ctypes.CDLL(None, use_errno=True)


class Limit:
    """Keeps what the page cache holds of some files below a limit, as long as it is entered.

    Args:
        files: of them.
        nbytes: the limit; None to watch only.
        mapped: this process maps them, so that pages have to leave its tables first.

    Attributes:
        peak: the most that was seen, in bytes.
    """

    def __init__(self, files: Sequence[Path], nbytes: int | None, *, mapped: bool = False) -> None:
        self._files, self._limit, self._mapped = list(files), nbytes, mapped
        self._open = [os.open(path, os.O_RDONLY) for path in files]
        self._size = sum(path.stat().st_size for path in files)
        self._random, self._end = random.Random(0), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0

    def cached(self) -> int:
        """Bytes that the page cache holds of the files."""
        found = 0
        for file in self._open:
            span, said = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
            if _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(file), span, said, ctypes.c_uint(0)):
                raise SystemExit("this kernel does not say what the page cache holds (cachestat, Linux 6.5).")
            found += said[0] * 4096
        return found

    def forget_peak(self) -> None:
        self.peak = 0

    def __enter__(self) -> "Limit":
        self._trim()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for file in self._open:
            os.close(file)

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, self.cached())
            self._trim()

    def _trim(self) -> None:
        maps = self._maps() if self._mapped else []
        while self._limit is not None and (surplus := (held := self.cached()) - self._limit) > 0:
            for _ in range(1 + surplus * self._size // (held * _PIECE)):  # a random piece is there with held / size
                number = self._random.randrange(len(self._open))
                offset = self._random.randrange(0, os.fstat(self._open[number]).st_size, _PIECE)
                for address, first, nbytes in maps:
                    if first <= offset < first + nbytes:
                        size = min(_PIECE, first + nbytes - offset)
                        at = ctypes.c_void_p(address + offset - first)
                        _libc.madvise(at, ctypes.c_size_t(size), ctypes.c_int(_MADV_PAGEOUT))
                os.posix_fadvise(self._open[number], offset, _PIECE, os.POSIX_FADV_DONTNEED)

    def _maps(self) -> list[tuple[int, int, int]]:
        """Address, first byte in the file and bytes of each mapping."""
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(self._files[0]):
                begin, end = (int(part, 16) for part in fields[0].split("-"))
                found.append((begin, int(fields[2], 16), end - begin))
        return found
