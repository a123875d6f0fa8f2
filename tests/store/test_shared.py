"""Experts that several ranks of a machine have are in its memory once, as the kernel counts, and go with the last."""

import multiprocessing
from pathlib import Path

import pytest
import xxhash

from tests.small_model import make_experts
from tests.store.stores import write
from vllm_dymoe.residency.format import all_keys
from vllm_dymoe.store import FileStore, whole_level
from vllm_dymoe.store.shared import SharedMemory, Turn
from vllm_dymoe.transfer import HostLevel

EXPERTS = make_experts(layers=3, num_experts=16, hidden=256, intermediate=256)
KEYS = list(all_keys(EXPERTS))


def make_level(folder):
    """Beside the store lies the lock, as beside a store that ranks have packed."""
    shared = SharedMemory(folder, Turn(folder))
    level = HostLevel(FileStore(folder), whole_level(EXPERTS), shared=shared)
    level.fill()
    return level, shared


def digest(store, blob):
    return xxhash.xxh3_64_hexdigest(b"".join(blob(store, key).numpy().tobytes() for key in KEYS))


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
    level, shared = make_level(folder)
    actions = {
        "found": lambda: (shared.found, level.files.counts.reads),
        "digest": lambda: digest(level, HostLevel.blob),
        "pss": pss,
        "sleep": level.sleep,
        "wake": level.wake,
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
    assert sum(both) == pytest.approx(whole_level(EXPERTS), rel=0.02)
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
    level, shared = make_level(folder)
    assert not shared.found, "memory outlived its processes"
    assert digest(level, HostLevel.blob) == want
    level.close()


def test_a_store_that_was_written_again_is_another(tmp_path):
    folder = tmp_path / "rank-0-0"
    write(folder, EXPERTS).close()
    held, _ = make_level(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    write(folder, EXPERTS).close()
    rank = Rank(folder)
    assert rank.ask("found") == (False, len(KEYS))
    rank.process.kill()
    held.close()
