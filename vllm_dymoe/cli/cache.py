"""``vllm-dymoe cache``: lists and removes packed experts.

Earlier starts wrote them to ``store_dir``.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.markup import escape

from vllm_dymoe.cache.store import MANIFEST, DamagedStoreError, Manifest, StoreError
from vllm_dymoe.cli.display import print_table
from vllm_dymoe.durable import clean, is_temporary, is_written
from vllm_dymoe.options import ConfigError, store_root
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.units import size

_NAME = re.compile(r".*-[0-9a-f]{16}")
_RANK = re.compile(r"rank-\d+-\d+(\.lock|\.partial-.+)?")
COMPLETE, DAMAGED, UNFINISHED, WRITTEN = "complete", "damaged", "unfinished", "being written"
_USELESS = (DAMAGED, UNFINISHED)


@dataclass(frozen=True)
class CachedModel:
    """Content of one folder of the cache: the experts of a model, for each rank."""

    name: str  # name of the folder: the model's and its fingerprint
    state: str
    bytes: int
    ranks: int  # number of complete ranks
    bits: tuple[int, ...]
    quantizer: str
    unused_days: int  # days since a file was read or written, as far as the file system records it


def list_stores(store_dir: Path | None, *, as_json: bool) -> None:
    """Print the content of the cache, the largest first."""
    root = _root(store_dir)
    found = sorted(cached_models(root), key=lambda one: -one.bytes)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    rows = [
        (escape(one.name), one.state, size(one.bytes), str(one.ranks), _bits(one), one.quantizer, str(one.unused_days))
        for one in found
    ]
    print_table(escape(str(root)), ("model", "state", "size", "ranks", "bits", "quantizer", "days unused"), rows)


def clean_stores(names: Sequence[str], store_dir: Path | None, *, everything: bool, unused_days: int | None) -> None:
    """Remove stores by name, all, or those unused for some days.

    Without a choice, remove those that no start can use.

    Raises:
        ConfigError: a name is unknown, or a store is being written.
    """
    root = _root(store_dir)
    found = {one.name: one for one in cached_models(root)}
    for name in names:
        if name not in found:
            raise ConfigError(f"there is no store {name!r} in {root}; `vllm-dymoe cache list` names them.")
        if found[name].state == WRITTEN:
            raise ConfigError(f"{name} is being written by a running start; stop that first.")
    chosen = [found[name] for name in names]
    if not names:
        chosen = [one for one in found.values() if everything or one.state in _USELESS]
        if unused_days is not None:
            chosen = [one for one in found.values() if one.unused_days >= unused_days]
    for one in chosen:
        removed = _remove(root / one.name)
        typer.echo(f"{'removed' if removed else 'left'} {one.name}, {size(one.bytes)}.")
    if not chosen:
        typer.echo("Nothing to remove; name a store, or use --all or --unused-days.")


def cached_models(root: Path) -> list[CachedModel]:
    """Return every folder of packed experts in a root; other content is ignored."""
    if not root.is_dir():
        return []
    folders = (Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    named = (folder for folder in sorted(folders) if _NAME.fullmatch(folder.name))
    return [_describe(folder, _parts(folder)) for folder in named if _is_ours(folder)]


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds stores of ranks, or nothing."""
    entries = os.listdir(folder)
    return not entries or any(map(_RANK.fullmatch, entries))


def _describe(folder: Path, parts: Sequence[Path]) -> CachedModel:
    files = [path for part in parts for path in part.iterdir()]
    times = [time_ for path in files for time_ in (path.lstat().st_atime, path.lstat().st_mtime)]
    manifests, states = [], list[str]()
    for part in parts:
        if is_temporary(part):
            states.append(WRITTEN if is_written(part) else UNFINISHED)
            continue
        try:
            manifests.append(Manifest.read(part))
        except DamagedStoreError:
            states.append(DAMAGED)
        except StoreError:
            states.append(_version(part))
    order = (WRITTEN, DAMAGED, *states, UNFINISHED)
    bad = next((state for state in order if state in states and (state != UNFINISHED or not manifests)), None)
    first = manifests[0] if manifests else None
    return CachedModel(
        name=folder.name,
        state=bad or (COMPLETE if manifests else UNFINISHED),
        bytes=sum(path.lstat().st_size for path in files),
        ranks=len(manifests),
        bits=() if first is None else tuple(sorted(first.experts.formats, reverse=True)),
        quantizer="" if first is None else first.quantizer,
        unused_days=int((time.time() - max(times, default=folder.lstat().st_mtime)) // 86400),
    )


def _version(part: Path) -> str:
    """Return the plugin version in a manifest of another version.

    If there is none, return that the manifest cannot be read.
    """
    try:
        return f"version {json.loads((part / MANIFEST).read_bytes())['version']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "cannot be read"


def _parts(folder: Path) -> list[Path]:
    """Return the stores of ranks, and temporary folders."""
    entries = (Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    return sorted(path for path in entries if _RANK.fullmatch(path.name))


def _remove(folder: Path) -> bool:
    """Remove stores, except those being written; return whether none is left.

    The folder goes with them, unless it holds anything else.
    """
    parts = _parts(folder)
    clean(path for path in parts if is_temporary(path))
    for path in parts:
        if not is_temporary(path):
            shutil.rmtree(path, ignore_errors=True)
    if _parts(folder):
        return False
    with contextlib.suppress(OSError):
        for lock in folder.glob("rank-*.lock"):
            lock.unlink()
        folder.rmdir()
    return True


def _bits(one: CachedModel) -> str:
    return ", ".join(map(str, one.bits))


def _root(store_dir: Path | None) -> Path:
    """Return the given folder, or the one where a start would look."""
    return store_root(resolve_options().store_dir if store_dir is None else store_dir)
