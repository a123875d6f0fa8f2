"""Mapped files, from which a CPU computes experts that are in the page cache.

Copying one into a slot would take longer than reading it once. A failing read is an error that a request can report,
but a failing page of a mapping would kill the process. So the native library guards mappings: a page that cannot be
read becomes zeros and is counted, and from then on files are read instead.
"""

import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Callable

import torch

from vllm_dymoe.kernels import native

_SECONDS = 1.0  # time for which a slice counts as being in memory after a check
_AFTER = 1 << 30  # bytes after the end of a file where the page cache surely holds no page of it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED


class MappedFile:
    """The bytes of a file.

    OSError if they cannot be mapped or guarded, or if the system does not tell which of them are in memory.
    """

    def __init__(self, file: int) -> None:
        library = native.load()
        if library is None:
            raise OSError("there is no native library")
        self._library, nbytes = library, os.fstat(file).st_size
        if not tells_pages(file):
            raise OSError("the system tells only who owns a file, or may write it, which of its pages are in memory")
        numbers: list[int] = []

        def end_guard() -> None:
            for number in numbers:
                library.guard(None, 0, number)

        self.bytes = map_file(file, nbytes, end=end_guard)
        numbers.append(library.guard(self.bytes.data_ptr(), nbytes, -1))
        if numbers[0] < 0:
            numbers.clear()
            raise OSError(errno.ENOMEM, "too many files are mapped")
        self._known: dict[int, float] = {}  # by first byte, the time until which a part counts as being in memory

    def was_looked_at(self, begin: int) -> bool:
        """Return whether a part was recently in memory, so that ``has`` need not check."""
        return self._known.get(begin, 0.0) > time.monotonic()

    def has(self, begin: int, nbytes: int) -> bool:
        """Return whether a part is in memory, or was recently."""
        if self.was_looked_at(begin):
            return True
        if there := self._library.resident(self.bytes[begin : begin + nbytes]):
            self._known[begin] = time.monotonic() + _SECONDS
        return there


def tells_pages(file: int) -> bool:
    """Return whether the system tells which pages of a file are in memory.

    Of a file that this process neither owns nor may write, Linux says since 5.2 that all are: also a page long after
    the file's end. OSError if that page cannot be mapped.
    """
    library, end = native.load(), os.fstat(file).st_size // mmap.PAGESIZE * mmap.PAGESIZE
    return library is not None and not library.resident(map_file(file, mmap.PAGESIZE, end + _AFTER))


def in_page_cache(file: int, offset: int, nbytes: int) -> bool:
    """Return whether the page cache has a part of a file; False if that is unknown.

    Unlike a read that must not wait, this starts no read-ahead.
    """
    library, begin = native.load(), offset // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        if library is None or not tells_pages(file):
            return False
        return library.resident(map_file(file, offset + nbytes - begin, begin))
    except OSError:
        return False


def map_file(
    file: int, nbytes: int, offset: int = 0, *, writable: bool = False, end: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """Map a part of a file, shared with other processes, as uint8 [nbytes].

    Unlike ``mmap.mmap`` it keeps no descriptor. The mapping lasts until the last tensor over it is gone; ``end`` is
    called before it is removed. Raises OSError if the part cannot be mapped.
    """
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    begin = _libc.mmap(None, nbytes, prot, mmap.MAP_SHARED, file, offset)
    if begin == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_uint8 * nbytes).from_address(begin)

    def unmap() -> None:
        end()
        _libc.munmap(begin, nbytes)

    # At exit a thread may still compute from it.
    weakref.finalize(memory, unmap).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def lost_pages() -> int:
    """Return how many pages of mapped files could not be read in this process."""
    library = native.load()
    return 0 if library is None else int(library.lost_pages())
