"""Files that are mapped, so that a CPU computes experts out of the page cache: copies into slots take longer than
reading once does.

A read that fails is an error that a request can report; a mapping would end the process. So the native library guards
mappings: a page that cannot be had reads as zeros, and is counted, and from then on files are read as ever.
"""

import mmap
import time
import warnings
import weakref

import torch

from vllm_dymoe.kernels import native

_SECONDS = 1.0  # for which a slice that was in memory is taken to be there


class MappedFile:
    """The bytes of a file, which stays open; OSError if they cannot be mapped, or guarded."""

    def __init__(self, file: int) -> None:
        library = native.load()
        if library is None:
            raise OSError("there is no native library")
        self._library, mapping = library, mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        number = library.guard(self.bytes.data_ptr(), len(mapping), -1)
        if number < 0:
            raise OSError("too many files are mapped")
        weakref.finalize(mapping, library.guard, None, 0, number)
        self._known: dict[int, float] = {}  # by first byte, until when a part counts as being in memory

    def has(self, begin: int, nbytes: int) -> bool:
        """Whether a part is in memory, or was just now."""
        now = time.monotonic()
        if self._known.get(begin, 0.0) > now:
            return True
        if there := self._library.resident(self.bytes[begin : begin + nbytes]):
            self._known[begin] = now + _SECONDS
        return there


def lost_pages() -> int:
    """Pages of mapped files, in this process, that could not be had."""
    library = native.load()
    return 0 if library is None else int(library.lost_pages())
