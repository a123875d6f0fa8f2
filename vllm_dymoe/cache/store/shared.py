"""One copy of experts in host memory for all ranks of a machine with equal ones.

One rank reads them, others map the copy. It is a file without a name (``memfd``), which is freed with the last process
that has it, however that ends. Ranks take turns by a lock next to the store, so that a copy that is found is filled.
Every rank that has it offers it to the next one at a Unix socket of its own, in a folder that only this user can enter:

    $XDG_RUNTIME_DIR or /tmp / vllm-dymoe-UID / COPY.RANDOM
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_dymoe.cache.store.base import HostMemoryError, StoreError
from vllm_dymoe.cache.store.manifest import MANIFEST
from vllm_dymoe.cache.store.mapped import map_file
from vllm_dymoe.durable import close_file, make_folders, open_private

_WHOLE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK  # no process can truncate it, which would kill its readers with SIGBUS
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, linux/fcntl.h: only existing mappings may write
_SECONDS = 5.0  # in which a live process hands over a descriptor; a stopped one is not waited for
_PAUSE = 0.05
_CREDENTIALS = struct.Struct("3i")  # process, user and group, ``struct ucred`` of unix(7)


class Turn:
    """Excludes other processes from writing a store, or reading it into memory.

    Lasts from ``begin`` to ``end``, or to the process's death.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path, self._file = folder, folder.with_name(f"{folder.name}.lock"), -1

    def begin(self) -> None:
        """Wait for the turn, unless this process has it.

        StoreError if the lock file cannot be created, or the file system has no locks.
        """
        if self._file >= 0:
            return
        try:
            self._file = self._open()
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self.end()
            raise StoreError(
                f"{self._path} cannot be locked ({error.strerror}), but ranks share a store by locks; set store_dir "
                "to a folder on a disk of this machine"
            ) from error

    def _open(self) -> int:
        """Open the lock file, for writing if that is allowed: locks of NFS need it.

        If a store exists but its folder may not be written, all processes lock the store's folder itself.
        """
        flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        for access in (os.O_RDWR, os.O_RDONLY):
            try:
                make_folders(self._path.parent)
                return os.open(self._path, access | flags, 0o644)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                refused = error
        if not self._folder.is_dir():
            raise refused
        return os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def end(self) -> None:
        if self._file >= 0:
            close_file(self._file)
            self._file = -1


class Offer:
    """Hands a descriptor to this user's processes that ask for it by name.

    The offer lasts until it is closed.
    """

    def __init__(self, name: str, file: int) -> None:
        self._file, self._closed, path = file, False, f"{name}.{secrets.token_hex(4)}"
        with contextlib.ExitStack() as undo:
            folder = _sockets()
            undo.callback(close_file, folder)
            self._socket = undo.enter_context(_unix_socket())
            self._socket.bind(_inside(folder, path))
            undo.callback(_remove, folder, path)
            self._socket.listen()
            self._thread = threading.Thread(target=self._answer, name="vllm-dymoe shared experts", daemon=True)
            self._thread.start()
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        self._thread.join()
        self._undo.close()

    def _answer(self) -> None:
        while not self._closed:
            try:
                asking, _ = self._socket.accept()
            except OSError:  # no descriptor is left, or the socket is closed
                time.sleep(_PAUSE)
                continue
            with asking, contextlib.suppress(OSError):  # the asking process may have ended meanwhile
                asking.settimeout(_SECONDS)
                if _user_of(asking) == os.geteuid():
                    socket.send_fds(asking, [b"."], [self._file])


def ask_for(name: str) -> Iterator[int]:
    """Yield descriptors that this user's processes offer under a name.

    The caller owns them. Sockets of dead processes are removed. OSError if the folder of sockets is not this user's
    alone.
    """
    folder = _sockets()
    try:
        for path in sorted(os.listdir(folder)):
            if path.startswith(f"{name}."):
                yield from _received(folder, path)
    finally:
        close_file(folder)


def _received(folder: int, path: str) -> list[int]:
    """Return the descriptor that a process of this user hands over at a socket.

    Empty if there is none.
    """
    with contextlib.suppress(OSError), _unix_socket() as asking:
        asking.settimeout(_SECONDS)
        try:
            asking.connect(_inside(folder, path))
        except ConnectionRefusedError:
            _remove(folder, path)
            return []
        if _user_of(asking) == os.geteuid():
            return list(socket.recv_fds(asking, 1, 1, socket.MSG_CMSG_CLOEXEC)[1])
    return []


def _remove(folder: int, path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=folder)


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _sockets() -> int:
    """Open the folder of this user's sockets."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    root = given if given and os.access(given, os.W_OK) else tempfile.gettempdir()
    return open_private(Path(root) / f"vllm-dymoe-{os.geteuid()}")


def _inside(folder: int, path: str) -> str:
    """Return the address of a socket in an open folder.

    The folder's own path may be too long for an address.
    """
    return f"/proc/self/fd/{folder}/{path}"


def _user_of(connected: socket.socket) -> int:
    """Return the user of the process at the other end."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


class SharedMemory:
    """The copy that a store's processes share.

    Call ``begin``, ``map`` all of it in order, and ``publish`` once it is filled.

    The seals of a found copy prove that it is this user's, cannot be truncated and was published. The caller must
    verify its bytes against checksums: a process with this user's rights can make such a file.

    Attributes:
        found: another process has filled it.
    """

    def __init__(self, folder: Path, turn: Turn) -> None:
        try:
            status = (folder / MANIFEST).stat()  # differs if the store is written again
        except OSError as error:
            raise StoreError(f"{folder / MANIFEST} cannot be read ({error.strerror}); check its disk.") from error
        said = f"{folder.resolve()} {status.st_ino} {status.st_mtime_ns}"
        self._name = f"dymoe-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        self._turn, self._file, self._begin, self.found = turn, -1, 0, False
        self._offer: Offer | None = None  # None until it is published
        self._pinned = False  # a driver has pinned the memory, which requires that it is writable

    def begin(self, nbytes: int) -> None:
        """Find the copy, or allocate ``nbytes`` for one while no other process does.

        HostMemoryError if there is no memory.
        """
        self.close()
        self._turn.begin()
        with self._refusals():
            self._file, self._begin, self._pinned = self._find(nbytes), 0, False
        self.found = self._file >= 0
        if not self.found:
            with self._refusals():
                self._file = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self._file, nbytes)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _WHOLE)

    def map(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Map the next whole pages: uint8 [nbytes].

        Pages that another process has filled are read-only, unless a driver has to pin them, which requires writable
        pages.
        """
        self._pinned |= pinned
        part = map_file(self._file, nbytes, self._begin, writable=pinned or not self.found)
        self._begin += nbytes
        return part

    def publish(self) -> None:
        """Publish the filled and verified copy.

        From now on other processes may take their turn, and find it.
        """
        with self._refusals():
            if not self.found:
                seals = fcntl.F_SEAL_SEAL | (0 if self._pinned else _FUTURE_WRITE)
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            self._offer = Offer(self._name, self._file)
        self._turn.end()

    def close(self) -> None:
        """Stop offering the copy; mapped memory stays."""
        if self._offer is not None:
            self._offer.close()
            self._offer = None
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
            raise HostMemoryError(f"memory that ranks share could not be allocated ({error.strerror})") from error

    def _find(self, nbytes: int) -> int:
        """Return a descriptor of the copy from any process that has it; -1 if none has."""
        for found in ask_for(self._name):
            with contextlib.suppress(OSError):
                if _is_published(found, nbytes):
                    return found
            close_file(found)
        return -1


def _is_published(file: int, nbytes: int) -> bool:
    """Return whether an open memfd is this user's and complete.

    Only root can give a file to another user.
    """
    status = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return False
    complete = seals & (_WHOLE | fcntl.F_SEAL_SEAL) == _WHOLE | fcntl.F_SEAL_SEAL
    return complete and (status.st_size, status.st_uid) == (nbytes, os.geteuid())
