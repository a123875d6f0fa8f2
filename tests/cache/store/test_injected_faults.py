"""Fail every system call and allocation of a store once.

``STEPS`` are what a start does with a store. Each step runs once to count its calls, and then once per call with that
call failing. A start may raise only a StoreError; a store that was good before keeps the same files; and no temporary
folder, half-written file or descriptor remains.
"""

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import shutil
import socket

import pytest
import torch

from tests.small_model import make_experts
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore, Manifest, StoreError, shared, whole_host_cache
from vllm_dymoe.cache.store import mapped as mapping
from vllm_dymoe.cache.store.disk import RATES, Reading
from vllm_dymoe.cache.store.shared import SharedMemory, Turn
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.durable import all_leftovers, clean, is_temporary
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.quantize.dummy import random_store

EXPERTS = make_experts(layers=2, num_experts=1, top_k=1, bits=(4,))
CALLS = [
    (os, "open"), (os, "close"), (os, "fstat"), (os, "stat"), (os, "pread"), (os, "preadv"), (os, "pwrite"),
    (os, "fsync"), (os, "ftruncate"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "fchmod"), (os, "chmod"),
    (os, "listdir"), (os, "memfd_create"), (os, "posix_fadvise"), (fcntl, "flock"), (fcntl, "fcntl"), (mmap, "mmap"),
    (shutil, "disk_usage"), (mapping, "map_file"), (shared, "_unix_socket"), (socket, "send_fds"),
    (socket, "recv_fds"),
]  # fmt: skip
ALLOCATIONS = [(torch, "empty"), (torch, "frombuffer"), (mmap, "mmap")]


def write_one(folder):
    random_store(EXPERTS, StoreWriter(folder, Manifest(EXPERTS, "rtn", "a model")), seed=1).close()


def open_and_read(folder):
    store = FileStore(folder)
    try:
        for way in (Reading(), Reading(direct=True), Reading(drops=True)):
            store.reading = way
            for key in all_keys(EXPERTS):
                store.read_into(key, torch.zeros(EXPERTS.formats[4].nbytes, dtype=torch.uint8))
    finally:
        store.close()


def compute_where_they_lie(folder):
    store = FileStore(folder)
    try:
        for key in all_keys(EXPERTS):
            store.in_memory(key)
    finally:
        store.close()


def measure(folder):
    store = FileStore(folder)
    try:
        store.rates()
    finally:
        store.close()


def share(folder):
    """Let one rank fill the shared copy, and another one map it."""
    with contextlib.ExitStack() as ranks:
        for _ in range(2):
            files = FileStore(folder)
            ranks.callback(files.close)
            level = HostCache(files, whole_host_cache(EXPERTS), shared=SharedMemory(folder, Turn(folder)))
            level.fill()
            ranks.callback(level.release)


def write_again(folder):
    """Write a store that another process published first; the other store stays."""
    write_one(folder)


def begin_and_clean(folder):
    StoreWriter(folder.with_name("other"), Manifest(EXPERTS, "rtn", "a model")).close()
    clean(all_leftovers(folder.parent.parent))


STEPS = [write_one, open_and_read, compute_where_they_lie, measure, share, write_again, begin_and_clean]


@contextlib.contextmanager
def failing(monkeypatch, module, name, number, error):
    """Fail the n-th call; yields a list that grows with each call."""
    real, calls = getattr(module, name), []

    def call(*arguments, **more):
        calls.append(arguments)
        if len(calls) - 1 == number:
            if name == "close":  # close() fails, but has closed the descriptor
                real(*arguments, **more)
            raise error
        return real(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, call)
        yield calls


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def snapshot(folder):
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir() if path.name != RATES}


def check(step, folder, monkeypatch, module, name, number, error):
    """Run a step with one failing call, and return the number of calls."""
    there = step is not write_one
    for path in folder.parent.iterdir():
        if path != folder or not there:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if there:
        (folder / RATES).unlink(missing_ok=True)
    before, known = descriptors(), snapshot(folder) if there else None
    with failing(monkeypatch, module, name, number, error) as calls:
        try:
            step(folder)
        except StoreError as failed:
            text = str(failed)
            assert "\n" not in text
            assert folder.name in text or "memory" in text or folder.parent.name in text, text
            del failed
        except MemoryError:
            assert isinstance(error, MemoryError), "only where memory was short"
    said = f"call {number} of {name} in {step.__name__} failed with {error!r}"
    if descriptors() != before:
        gc.collect()  # break reference cycles
    assert descriptors() == before, said
    if there:
        assert snapshot(folder) == known, said
    elif folder.exists():
        FileStore(folder).close()
    if name not in (
        "stat",
        "unlink",
        "listdir",
        "flock",
        "open",
        "close",
    ):  # if a removal fails, the next start removes what is left
        left = {path.name for path in folder.parent.iterdir()} - {folder.name, f"{folder.name}.lock"}
        assert not left, f"{said}: {left}"
    clean(path for path in folder.parent.iterdir() if is_temporary(path))
    assert not any(is_temporary(path) for path in folder.parent.iterdir()), said
    return len(calls)


def fail_in_turn(step, folder, monkeypatch, module, name, errors):
    """Fail each call of one kind in a run of its own; return the number of runs."""
    count = check(step, folder, monkeypatch, module, name, -1, errors[0])
    for number in range(count):
        check(step, folder, monkeypatch, module, name, number, errors[number % len(errors)])
    return count


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_policy_call_fails_once(tmp_path, monkeypatch, step):
    folder = tmp_path / "store"
    write_one(folder)
    step(folder)  # create whatever is created only once
    errors = [OSError(code, os.strerror(code)) for code in (errno.EIO, errno.EMFILE, errno.ENOSPC, errno.ENOMEM)]
    assert sum(fail_in_turn(step, folder, monkeypatch, module, name, errors) for module, name in CALLS) > 10


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_allocation_fails_once(tmp_path, monkeypatch, step):
    folder = tmp_path / "store"
    write_one(folder)
    for module, name in ALLOCATIONS:
        fail_in_turn(step, folder, monkeypatch, module, name, [MemoryError("no memory")])
