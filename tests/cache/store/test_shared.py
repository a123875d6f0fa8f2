"""Experts that several ranks of a machine have are in its memory once, as the kernel counts, and go with the last."""

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest
import xxhash

from tests.cache.store.stores import write
from tests.small_model import make_experts
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import DamagedStoreError, FileStore, StoreError, whole_host_cache
from vllm_dymoe.cache.store.shared import SharedMemory, Turn
from vllm_dymoe.experts.format import all_keys

EXPERTS = make_experts(layers=3, num_experts=16, hidden=256, intermediate=256)
KEYS = list(all_keys(EXPERTS))


def make_host_cache(folder):
    """Beside the store lies the lock, as beside a store that ranks have packed."""
    shared = SharedMemory(folder, Turn(folder))
    host_cache = HostCache(FileStore(folder), whole_host_cache(EXPERTS), shared=shared)
    host_cache.fill()
    return host_cache, shared


def digest(store, packed):
    return xxhash.xxh3_64_hexdigest(b"".join(packed(store, key).numpy().tobytes() for key in KEYS))


def pss():
    """Bytes of shared experts in this process, its part where others have them, too."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0][-1] != ":":
            ours = "/memfd:dymoe-" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def serve(folder, pipe):
    host_cache, shared = make_host_cache(folder)
    actions = {
        "found": lambda: (shared.found, host_cache.files.counts.reads),
        "digest": lambda: digest(host_cache, HostCache.packed),
        "pss": pss,
        "sleep": host_cache.sleep,
        "wake": host_cache.wake,
    }
    while (asked := pipe.recv()) != "end":
        pipe.send(actions[asked]())


class Rank:
    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(folder, theirs), daemon=True)
        self.process.start()

    def begin(self, asked):
        self._pipe.send(asked)

    def take(self):
        assert self._pipe.poll(60), "the rank has died, or waits for ever"
        return self._pipe.recv()

    def ask(self, asked):
        self.begin(asked)
        return self.take()


def test_ranks_with_the_same_experts_have_them_once_and_the_last_takes_them_along(tmp_path):
    folder = tmp_path / "rank-0-0"
    write(folder, EXPERTS).close()
    ranks = [Rank(folder) for _ in range(2)]
    for rank in ranks:
        rank.begin("found")
    found = [rank.take() for rank in ranks]
    assert sorted(found) == [(False, len(KEYS)), (True, 0)], "one reads, whatever the order"
    first, second = ranks if not found[0][0] else ranks[::-1]
    want = first.ask("digest")
    assert second.ask("digest") == want
    both = [rank.ask("pss") for rank in ranks]
    assert sum(both) == pytest.approx(whole_host_cache(EXPERTS), rel=0.02)
    assert max(both) < 0.6 * sum(both), "each has half of it"
    first.process.kill()
    first.process.join()
    third = Rank(folder)
    assert third.ask("found") == (True, 0), "by what the second has"
    second.ask("sleep")
    assert second.ask("pss") == 0
    assert third.ask("digest") == want
    second.ask("wake")
    assert second.ask("found") == (True, 0)
    assert second.ask("digest") == want
    for rank in (second, third):
        rank.process.kill()
        rank.process.join()
    host_cache, shared = make_host_cache(folder)
    assert not shared.found, "memory outlived its processes"
    assert digest(host_cache, HostCache.packed) == want
    host_cache.close()


def test_a_store_that_was_written_again_is_another(tmp_path):
    folder = tmp_path / "rank-0-0"
    write(folder, EXPERTS).close()
    held, _ = make_host_cache(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write(folder, EXPERTS).close()
    rank = Rank(folder)
    assert rank.ask("found") == (False, len(KEYS))
    rank.process.kill()
    held.close()


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "rank-0-0", EXPERTS).close()
    return tmp_path / "rank-0-0"


def plant(folder, *, seals=0, content=b""):
    """A copy that another user has put where ranks look for one, filled with something else."""
    shared = SharedMemory(folder, Turn(folder))
    file = os.memfd_create(shared._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, whole_host_cache(EXPERTS))
    os.pwrite(file, content, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def seals_of_ours(folder):
    host_cache, shared = make_host_cache(folder)
    try:
        return fcntl.fcntl(shared._file, fcntl.F_GET_SEALS)
    finally:
        host_cache.close()


def test_a_copy_that_is_not_complete_is_not_taken(folder):
    """Nor one that can be cut off, which would end its readers with SIGBUS."""
    files = [plant(folder), plant(folder, seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)]
    host_cache, shared = make_host_cache(folder)
    assert not shared.found
    host_cache.close()
    for file in files:
        os.close(file)


def test_a_copy_of_another_user_is_not_taken(folder, monkeypatch):
    file = plant(folder, seals=seals_of_ours(folder))
    os.fchown(file, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    host_cache, shared = make_host_cache(folder)
    assert not shared.found
    host_cache.close()
    os.close(file)


def test_a_copy_with_other_bytes_is_refused(folder):
    file = plant(folder, seals=seals_of_ours(folder), content=b"\x00" * 5000)
    with pytest.raises(StoreError) as caught:
        make_host_cache(folder)
    assert not isinstance(caught.value, DamagedStoreError), "the store itself is good"
    os.close(file)
    host_cache, shared = make_host_cache(folder)
    assert not shared.found
    host_cache.close()


def test_what_is_published_can_neither_be_cut_off_nor_written_to(folder):
    host_cache, shared = make_host_cache(folder)
    with pytest.raises(PermissionError):
        os.ftruncate(shared._file, 0)
    with pytest.raises(PermissionError):
        os.pwrite(shared._file, b"x", 0)
    host_cache.close()


def test_the_lock_beside_a_store_is_not_followed(folder, tmp_path):
    victim = tmp_path / "victim"
    folder.with_name(f"{folder.name}.lock").symlink_to(victim)
    with pytest.raises(StoreError):
        make_host_cache(folder)
    assert not victim.exists()
