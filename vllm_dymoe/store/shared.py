"""One copy of experts in host memory for the ranks of a machine that have the same: one reads them, others map it.

The copy is a file without a name (``memfd``), which goes with the last process that has it, however that ends. Beside
the store lie a lock, behind which ranks take turns, and a note of the processes that have the file.
"""

import fcntl
import hashlib
import mmap
import os
import warnings
from pathlib import Path

import torch

from vllm_dymoe.store.base import StoreError
from vllm_dymoe.store.manifest import MANIFEST


class Turn:
    """Excludes other processes from writing a store, or reading it into memory: from ``begin`` to ``end``, or to a
    death. ``path`` is the lock."""

    def __init__(self, folder: Path) -> None:
        self.path, self._file = folder.with_name(f"{folder.name}.lock"), -1

    def begin(self) -> None:
        """Wait for it, unless it is had; StoreError where the folder cannot be written, or has no locks."""
        if self._file >= 0:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self.end()
            raise StoreError(
                f"{self.path} cannot be locked ({error.strerror}), by which ranks share one store; set store_dir to "
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
        self._notes, self._turn = turn.path.with_suffix(".shared"), turn
        status = (folder / MANIFEST).stat()  # another one if the store is written again
        said = f"{folder.resolve()} {status.st_ino} {status.st_mtime_ns}"
        self._name = f"dymoe-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        self._file, self._begin, self.found = -1, 0, False

    def begin(self, nbytes: int) -> None:
        """Find the copy, or make one of so many bytes, while no other process does."""
        self.close()
        self._turn.begin()
        self._file, self._begin = self._find(nbytes), 0
        self.found = self._file >= 0
        if not self.found:
            self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
            os.ftruncate(self._file, nbytes)

    def map(self, nbytes: int, *, locked: bool) -> torch.Tensor:
        """The next whole pages: uint8 [nbytes]. What another process has filled is not writable, unless a driver has to
        lock it, which takes only what is."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if locked or not self.found else 0)
        mapping = mmap.mmap(self._file, nbytes, mmap.MAP_SHARED, prot, offset=self._begin)
        self._begin += nbytes
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mapping, dtype=torch.uint8)

    def publish(self) -> None:
        """It is filled, and may be found from now on."""
        there = [*self._living(), (os.getpid(), self._file)]
        self._notes.write_text("".join(f"{process} {file}\n" for process, file in there))
        self._turn.end()

    def close(self) -> None:
        """Memory that is mapped stays; others may take their turn."""
        self._turn.end()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _find(self, nbytes: int) -> int:
        for process, file in self._living():
            try:
                found = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # it has ended meanwhile, or belongs to another user
                continue
            if os.fstat(found).st_size == nbytes:
                return found
            os.close(found)
        return -1

    def _living(self) -> list[tuple[int, int]]:
        """Processes that have the copy, and their descriptors of it."""
        try:
            lines = [line.split() for line in self._notes.read_text().splitlines()]
        except OSError:
            return []
        noted = [(int(process), int(file)) for process, file in lines if int(process) != os.getpid()]
        return [which for which in noted if self._has(*which)]

    def _has(self, process: int, file: int) -> bool:
        try:
            return os.readlink(f"/proc/{process}/fd/{file}").startswith(f"/memfd:{self._name} ")
        except OSError:
            return False
