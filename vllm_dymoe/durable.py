"""Files and folders that exist whole or not at all, whenever a process dies.

A folder that is being written is ``NAME.partial-BOOT-RANDOM`` next to the final one, and private until it is complete.
A lock (``flock``) on it proves that its writer lives; host names and process ids prove nothing, because containers
share them. Every start removes temporary folders that no process holds. BOOT identifies the running kernel: locks of
another machine on a shared disk are not visible, so another machine's folders are left alone while anything in them is
new.
"""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

Measured = TypeVar("Measured")
_TEMPORARY = ".partial-"
_REPLACED = "-replaced"
_TEMPORARY_FILE = ".dymoe-partial"  # nobody else's files end so, because old ones are removed
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755  # whatever the umask: others may read complete files, and write nothing
PRIVATE_MODE = 0o600  # of files that reveal information about prompts
_OLD_SECONDS = 3600.0  # age at which a folder of another machine counts as given up
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def open_regular(path: Path | str) -> int:
    """Open a regular file for reading.

    Raises OSError also for a folder, a device or a FIFO; opening a FIFO would otherwise block for ever.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
    except BaseException:
        close_file(file)
        raise
    return file


def close_file(file: int) -> None:
    """Close a descriptor and ignore errors: its data has been synced before."""
    with contextlib.suppress(OSError):
        os.close(file)


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file; OSError as ``open_regular``."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` with ``pwrite``."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def create(path: Path, *, exclusive: bool = True) -> int:
    """Create a file for reading and writing, and open it.

    Raises OSError for a symbolic link, and for an existing file if it has to be new.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
    file = os.open(path, flags, 0o600)
    try:
        os.fchmod(file, _FILE_MODE)
    except BaseException:
        close_file(file)
        raise
    return file


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file in one write, and make it durable.

    An incomplete last line of a killed process is cut off.
    """
    file = create(path, exclusive=False)
    try:
        end = os.pread(file, os.fstat(file).st_size, 0).rfind(b"\n") + 1
        os.ftruncate(file, end)
        write_at(file, line + b"\n", end)
        os.fsync(file)
    finally:
        close_file(file)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file in a folder that no other user can write, and make it durable."""
    file = create(path, exclusive=False)
    try:
        os.ftruncate(file, 0)
        write_at(file, content, 0)
        os.fsync(file)
    finally:
        close_file(file)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes that files take on their disk, where holes take none."""
    taken = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            taken += path.lstat().st_blocks * 512
    return taken


def replace_file(path: Path, content: bytes, mode: int = _FILE_MODE) -> None:
    """Replace a file atomically, also in a folder that others can write."""
    remove_given_up(path.parent, glob.escape(path.name))
    file, name = tempfile.mkstemp(suffix=_TEMPORARY_FILE, prefix=f".{path.name}.", dir=path.parent)  # new, private
    try:
        try:
            write_at(file, content, 0)
            os.fchmod(file, mode)
            os.fsync(file)
        finally:
            close_file(file)
        os.rename(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def remove_given_up(folder: Path, pattern: str) -> None:
    """Remove old temporary files of the files whose names match a pattern.

    A ``replace_file`` whose process was killed left them, as .NAME.RANDOM.dymoe-partial.
    """
    for left in folder.glob(f".{pattern}.*{_TEMPORARY_FILE}"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _OLD_SECONDS:
                left.unlink()


def keep_beside(path: Path, key: str, measured: Any) -> None:
    """Store a measured dataclass under a key, in a JSON file.

    The folder is created if needed. If it cannot be written, nothing is stored and the next start measures again.
    """
    kind = type(measured)
    kept = _all_kept(path, kind) | {key: measured}
    content = TypeAdapter(dict[str, kind]).dump_json(kept, indent=2)  # type: ignore[valid-type]
    with contextlib.suppress(OSError):
        make_folders(path.parent)
        replace_file(path, content + b"\n")


def kept_beside(path: Path, key: str, kind: type[Measured]) -> Measured | None:
    """Return the dataclass that was stored under a key, if it can be read."""
    return _all_kept(path, kind).get(key)


def _all_kept(path: Path, kind: type[Measured]) -> dict[str, Measured]:
    try:
        kept: dict[str, Measured] = TypeAdapter(dict[str, kind]).validate_json(  # type: ignore[valid-type]
            read_regular(path)
        )
    except (OSError, ValueError):
        return {}
    return kept


def make_folders(folder: Path) -> None:
    """Create a folder and its parents so that no other user may write there."""
    if not folder.is_dir():
        make_folders(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=_FOLDER_MODE)


def open_private(folder: Path) -> int:
    """Open a folder that is this user's alone, creating it if needed.

    Raises OSError if others can use it, too.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, f"{folder} is not this user's alone")
    except BaseException:
        close_file(file)
        raise
    return file


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        close_file(descriptor)


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed, or its process dies.

    Returns None if another process holds the lock, or has removed the folder; OSError if there are no locks.
    """
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(folder, follow_symlinks=False)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        close_file(file)
        raise
    close_file(file)
    return None


class Partial(NamedTuple):
    """A folder that is being written, and the descriptor that locks it.

    The descriptor is -1 if locks are not supported.
    """

    path: Path
    lock: int


def make_partial(folder: Path, resume: Callable[[Path], bool] = lambda leftover: False) -> Partial:
    """Create the temporary folder next to ``folder``, or continue a leftover one.

    A leftover folder is continued if its writer has died and ``resume`` accepts it. All other temporary folders of dead
    writers are removed.
    """
    found: Partial | None = None
    for leftover in leftovers(folder):
        with contextlib.suppress(OSError):
            if (lock := _lock_given_up(leftover)) is None:
                continue
            if found is None and _is_own(leftover) and resume(leftover):
                found = Partial(leftover, lock)
                continue
            _remove_locked(leftover, lock)
    while found is None:
        partial = folder.with_name(f"{folder.name}{_TEMPORARY}{_boot()}-{secrets.token_hex(4)}")
        os.mkdir(partial, 0o700)
        try:
            lock = lock_folder(partial)
        except OSError:  # no locks here, so no other process removes it either
            lock = -1
        if lock is not None:  # otherwise another process has removed it
            found = Partial(partial, lock)
    return found


def publish(partial: Path, folder: Path) -> None:
    """Give a complete temporary folder its name, if that is free."""
    partial.chmod(_FOLDER_MODE)
    os.rename(partial, folder)


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a complete temporary folder the name of another one, which is removed."""
    replaced = partial.with_name(f"{partial.name}{_REPLACED}")
    partial.chmod(_FOLDER_MODE)
    with _held(folder):
        os.rename(folder, replaced)
        try:
            os.rename(partial, folder)
        except OSError:
            os.rename(replaced, folder)
            raise
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Any:
    """Hold a folder's lock, if locks are supported.

    Without the lock, the folder would count as a leftover while it has another name.
    """
    try:
        lock = lock_folder(folder)
    except OSError:
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            close_file(lock)


def put_back(folder: Path) -> None:
    """Restore a folder whose writer died within ``replace_folder``.

    If it died between the two renames, the folder still has its other name.
    """
    if folder.exists():
        return
    for leftover in leftovers(folder):
        if leftover.name.endswith(_REPLACED) and (lock := _lock_given_up(leftover)) is not None:
            os.rename(leftover, folder)
            close_file(lock)
            return


def leftovers(folder: Path) -> list[Path]:
    """Return temporary folders next to ``folder``, of live and of dead writers.

    The list is empty if the parent folder cannot be listed.
    """
    with contextlib.suppress(OSError):
        return sorted(folder.parent.glob(f"{glob.escape(folder.name)}{_TEMPORARY}*"))
    return []


def all_leftovers(root: Path) -> list[Path]:
    """Return the leftovers of all stores below a root.

    The root has a folder for each model.
    """
    with contextlib.suppress(OSError):
        return sorted(root.glob(f"*/*{_TEMPORARY}*"))
    return []


def is_temporary(folder: Path) -> bool:
    """Return whether a folder's name is that of a temporary or a replaced folder."""
    return _TEMPORARY in folder.name


def is_written(temporary: Path) -> bool:
    """Return whether the writer of a temporary folder may be alive.

    Also True if this machine cannot tell.
    """
    try:
        lock = _lock_given_up(temporary)
    except OSError:
        return True
    if lock is not None:
        close_file(lock)
    return lock is None


def clean(temporary: Iterable[Path]) -> list[Path]:
    """Remove temporary folders whose writers have died; return them."""
    removed = []
    for leftover in temporary:
        with contextlib.suppress(OSError):
            if (lock := _lock_given_up(leftover)) is not None:
                _remove_locked(leftover, lock)
                removed.append(leftover)
    return removed


def _lock_given_up(leftover: Path) -> int | None:
    """Lock a temporary folder whose writer has died.

    Returns None if the writer is alive, or may be on another machine.
    """
    lock = lock_folder(leftover)
    if lock is None:
        return None
    boot = leftover.name.rpartition(_TEMPORARY)[2].partition("-")[0]
    try:
        if boot == _boot() or time.time() - _newest(leftover) > _OLD_SECONDS:
            return lock
    except BaseException:
        close_file(lock)
        raise
    close_file(lock)
    return None


def _newest(folder: Path) -> float:
    """Return when anything in a folder was last changed."""
    return max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))


def _remove_locked(folder: Path, lock: int) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        close_file(lock)


def _is_own(folder: Path) -> bool:
    """Return whether this user made the folder.

    Folders that others put next to a store are not continued.
    """
    return folder.lstat().st_uid == os.geteuid()


def _boot() -> str:
    """Return eight hex digits that identify the running kernel.

    All containers of a machine have the same.
    """
    try:
        return _BOOT_ID.read_text().strip().replace("-", "")[:8]
    except OSError:
        return "unknown"
