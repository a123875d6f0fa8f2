"""One copy of experts in host memory for the ranks of a machine that have the same: one reads them, others map it.

The copy is a file in no folder (``memfd``), which goes with the last process that has it, however that ends. Ranks take
turns behind a lock beside the store, so that a copy that is found is filled.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_dymoe.cache.store.base import HostMemoryError, StoreError
from vllm_dymoe.cache.store.durable import close_file, make_folders
from vllm_dymoe.cache.store.manifest import MANIFEST
from vllm_dymoe.cache.store.mapped import map_file

_WHOLE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK  # no process can cut it off, which would end its readers with SIGBUS
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, linux/fcntl.h: mappings that are there may write, and no others


class Turn:
    """Excludes other processes from writing a store, or reading it into memory: from ``begin`` to ``end``, or to a
    death."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path, self._file = folder, folder.with_name(f"{folder.name}.lock"), -1

    def begin(self) -> None:
        """Wait for it, unless it is had; StoreError where the folder cannot be written, or has no locks.

        Of a store that is there but may not be written the folder itself is locked, by all alike.
        """
        if self._file >= 0:
            return
        try:
            try:
                make_folders(self._path.parent)
                flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o644)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not self._folder.is_dir():
                    raise
                self._file = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self.end()
            raise StoreError(
                f"{self._path} cannot be locked ({error.strerror}), by which ranks share one store; set store_dir to "
                "a folder on a disk of this machine"
            ) from error

    def end(self) -> None:
        if self._file >= 0:
            close_file(self._file)
            self._file = -1


class SharedMemory:
    """The copy that a store's processes share; ``begin``, ``map`` all of it in order, ``publish`` when it is filled.

    A copy that is found is this user's, cannot be cut off and was published, as its seals say. Its bytes are for the
    caller to compare with their checksums: a process that has this user's rights can make such a file.

    Attributes:
        found: another process has filled it.
    """

    def __init__(self, folder: Path, turn: Turn) -> None:
        try:
            status = (folder / MANIFEST).stat()  # another one if the store is written again
        except OSError as error:
            raise StoreError(f"{folder / MANIFEST} cannot be read ({error.strerror}); check its disk.") from error
        said = f"{folder.resolve()} {status.st_ino} {status.st_mtime_ns}"
        self._name = f"dymoe-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        self._turn, self._file, self._begin, self.found = turn, -1, 0, False
        self._locked = False  # a driver has locked it, which takes only memory that is writable

    def begin(self, nbytes: int) -> None:
        """Find the copy, or make one of so many bytes, while no other process does; HostMemoryError if there is no
        room."""
        self.close()
        self._turn.begin()
        self._file, self._begin, self._locked = self._find(nbytes), 0, False
        self.found = self._file >= 0
        if not self.found:
            with self._refusals():
                self._file = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self._file, nbytes)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _WHOLE)

    def map(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """The next whole pages: uint8 [nbytes]. What another process has filled is not writable, unless a driver has to
        lock it, which takes only what is."""
        self._locked |= pinned
        part = map_file(self._file, nbytes, self._begin, writable=pinned or not self.found)
        self._begin += nbytes
        return part

    def publish(self) -> None:
        """It is filled, and what it holds is checked: others may take their turn, and find it."""
        if not self.found:
            with self._refusals():
                seals = fcntl.F_SEAL_SEAL | (0 if self._locked else _FUTURE_WRITE)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        self._turn.end()

    def close(self) -> None:
        """Not to be found here any more; memory that is mapped stays."""
        if self._file >= 0:
            close_file(self._file)
            self._file = -1
        self._turn.end()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise HostMemoryError(f"memory that ranks share could not be had ({error.strerror})") from error

    def _find(self, nbytes: int) -> int:
        """A descriptor of the copy in whatever process has it, which the kernel shows by its name; -1 without one."""
        for place in glob.iglob("/proc/[0-9]*/fd/*"):
            try:
                if os.readlink(place).startswith(f"/memfd:{self._name} "):
                    found = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                    if _is_published(found, nbytes):
                        return found
                    close_file(found)
            except OSError:  # it has ended meanwhile, or belongs to another user
                continue
        return -1


def _is_published(file: int, nbytes: int) -> bool:
    """Whether an open memfd is this user's, and complete. Only root can give a file to another user."""
    status = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return False
    complete = seals & (_WHOLE | fcntl.F_SEAL_SEAL) == _WHOLE | fcntl.F_SEAL_SEAL
    return complete and (status.st_size, status.st_uid) == (nbytes, os.geteuid())
