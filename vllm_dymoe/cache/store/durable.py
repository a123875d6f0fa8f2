"""Files and folders that are there whole or not at all, whenever a process dies."""

import contextlib
import glob
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

Measured = TypeVar("Measured")
_TEMPORARY = ".partial-"
_REPLACED = "-replaced"


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """``pwrite`` all of it."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def keep_beside(path: Path, measured: Any) -> None:
    """Keep a dataclass beside a store, for the next start; a folder that cannot be written is measured again."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        write_synced(partial, (json.dumps(asdict(measured), indent=2) + "\n").encode())
        partial.replace(path)


def kept_beside(path: Path, kind: type[Measured]) -> Measured | None:
    """The dataclass that was kept there, if it can be read."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_partial(folder: Path, resume: Callable[[Path], bool] = lambda leftover: False) -> Path:
    """Make the temporary folder beside ``folder``, from a leftover that ``resume`` accepts; remove all others."""
    partial = Path(tempfile.mkdtemp(prefix=f"{_prefix(folder)}{os.getpid()}-", dir=folder.parent))
    for leftover in _left_by_the_dead(folder):
        if resume(leftover) and not any(partial.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                os.rename(leftover, partial)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    partial.chmod(0o755)
    return partial


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a complete temporary folder the name of another one, which is removed."""
    replaced = partial.with_name(f"{partial.name}{_REPLACED}")
    os.rename(folder, replaced)
    try:
        os.rename(partial, folder)
    except OSError:
        os.rename(replaced, folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo what a writer that died between the two renames of ``replace_folder`` has done."""
    if not folder.exists():
        for leftover in _left_by_the_dead(folder):
            if leftover.name.endswith(_REPLACED):
                os.rename(leftover, folder)
                return


def _prefix(folder: Path) -> str:
    return f"{folder.name}{_TEMPORARY}{socket.gethostname()}-"


def _left_by_the_dead(folder: Path) -> Iterator[Path]:
    """Temporary folders beside ``folder`` of processes on this host that have ended."""
    prefix = _prefix(folder)
    for leftover in list(folder.parent.glob(f"{glob.escape(prefix)}*")):
        pid = leftover.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield leftover
