"""One copy of experts in host memory for the ranks of a machine that have the same: one reads them, others map it.

The copy is a file in no folder (``memfd``), which goes with the last process that has it, however that ends. Ranks take
turns behind a lock beside the store, so that a copy that is found is filled.
"""

import fcntl
import glob
import hashlib
import mmap
import os
import warnings
from pathlib import Path

import torch

from vllm_dymoe.cache.store.base import StoreError
from vllm_dymoe.cache.store.manifest import MANIFEST


class Turn:
    """Excludes other processes from writing a store, or reading it into memory: from ``begin`` to ``end``, or to a
    death."""

    def __init__(self, folder: Path) -> None:
        self._path, self._file = folder.with_name(f"{folder.name}.lock"), -1

    def begin(self) -> None:
        """Wait for it, unless it is had; StoreError where the folder cannot be written, or has no locks."""
        if self._file >= 0:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self.end()
            raise StoreError(
                f"{self._path} cannot be locked ({error.strerror}), by which ranks share one store; set store_dir to "
                "a folder on a disk of this machine"
            ) from error

    def end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SharedMemory:
    """The copy that a store's processes share; ``begin``, ``map`` all of it in order, ``publish`` when it is filled.

    Attributes:
        found: another process has filled it.
    """

    def __init__(self, folder: Path, turn: Turn) -> None:
        status = (folder / MANIFEST).stat()  # another one if the store is written again
        said = f"{folder.resolve()} {status.st_ino} {status.st_mtime_ns}"
        self._name = f"dymoe-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        self._turn, self._file, self._begin, self.found = turn, -1, 0, False

    def begin(self, nbytes: int) -> None:
        """Find the copy, or make one of so many bytes, while no other process does."""
        self.close()
        self._turn.begin()
        self._file, self._begin = self._find(nbytes), 0
        self.found = self._file >= 0
        if not self.found:
            self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
            os.ftruncate(self._file, nbytes)

    def map(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """The next whole pages: uint8 [nbytes]. What another process has filled is not writable, unless a driver has to
        lock it, which takes only what is."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if pinned or not self.found else 0)
        mapping = mmap.mmap(self._file, nbytes, mmap.MAP_SHARED, prot, offset=self._begin)
        self._begin += nbytes
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8)

    def publish(self) -> None:
        """It is filled: others may take their turn, and find it."""
        self._turn.end()

    def close(self) -> None:
        """Not to be found here any more; memory that is mapped stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._turn.end()

    def _find(self, nbytes: int) -> int:
        """A descriptor of the copy in whatever process has it, which the kernel shows by its name; -1 without one."""
        for place in glob.iglob("/proc/[0-9]*/fd/*"):
            try:
                if os.readlink(place).startswith(f"/memfd:{self._name} "):
                    found = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                    if os.fstat(found).st_size == nbytes:
                        return found
                    os.close(found)
            except OSError:  # it has ended meanwhile, or belongs to another user
                continue
        return -1
