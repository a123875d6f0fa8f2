"""Experts that several ranks of a machine have are in its memory once, as the kernel counts, and go with the last."""

import multiprocessing
from pathlib import Path

import pytest
import xxhash

from tests.cache.store.stores import write
from tests.small_model import make_experts
from vllm_dymoe.cache.store import FileStore, whole_host_cache
from vllm_dymoe.cache.store.shared import SharedMemory, Turn
from vllm_dymoe.cache.transfer import HostCache
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
