"""Host memory as a level: the bytes of the files, within a budget, whatever is asked for, in whatever order."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from tests.runtime.decided import run_decided
from tests.runtime.steps import STEPS, make_runtime, run
from tests.small_model import make_experts
from tests.store.locks import RecordedLock
from tests.store.stores import damage, read, write
from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.format import BlobKey, all_keys, layer_keys
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.moe import resize_host_memory
from vllm_dymoe.store import FileStore, HostMemoryError, StoreError, smallest_level, whole_level
from vllm_dymoe.store.disk import Reading
from vllm_dymoe.store.files import file_name
from vllm_dymoe.transfer import HostLevel, TransferError, join

EXPERTS = make_experts(layers=3, num_experts=8, top_k=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("level") / "store"
    write(folder, EXPERTS).close()
    return folder


@pytest.fixture
def make_level(folder):
    made = []

    def make(nbytes, lock=None, timeout=None, depth=3):
        files = FileStore(folder)
        files.reading = Reading(depth=depth)
        made.append(HostLevel(files, nbytes, lock, timeout))
        return made[-1]

    yield make
    for level in made:
        level.close()


def share(part):
    return int(whole_level(EXPERTS) * part)


@pytest.mark.parametrize("nbytes", [smallest_level(EXPERTS), share(0.3), share(0.7), share(1)])
def test_every_slice_is_the_files_whatever_was_asked_before_and_the_budget_is_kept(make_level, folder, nbytes):
    level, files, random_ = make_level(nbytes), FileStore(folder), random.Random(nbytes)
    keys = list(all_keys(EXPERTS))
    want = {key: read(files, key) for key in keys}
    assert level.slots.nbytes <= nbytes
    errors = []

    def ask(seed):
        mine = random.Random(seed)
        try:
            for _ in range(60):
                key = mine.choice(keys)
                assert torch.equal(read(level, key), want[key])
        except Exception as error:
            errors.append(error)

    for round_ in range(4):
        layer = random_.randrange(3)
        level.reads.expect(layer, random_.sample(list(layer_keys(EXPERTS, layer)), 5))
        level.reads.prefetch(random_.sample(keys, 6))
        threads = [threading.Thread(target=ask, args=(4 * round_ + number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        level.check_integrity()
    files.close()


def test_what_fits_is_read_once_and_what_does_not_is_kept_by_heat(make_level):
    level = make_level(share(1))
    level.fill()
    assert level.whole
    assert (len(level.slots.held), level.files.counts.reads) == (len(list(all_keys(EXPERTS))),) * 2
    read(level, BlobKey(2, 7, 4))
    assert level.files.counts.reads == len(list(all_keys(EXPERTS)))
    level = make_level(share(0.5))
    hot = [BlobKey(1, 2, 4), BlobKey(1, 5, 4)]
    for cold in range(40):
        asked = {*hot, BlobKey(1, cold % 8, 4)}
        level.reads.expect(1, list(asked))
        for key in asked:
            read(level, key)
    before, kept = level.files.counts.reads, level.slots.pools[4].table.residents(Tier.HI)
    assert {(key.layer, key.expert) for key in hot} <= kept
    for key in hot:
        read(level, key)
    assert level.files.counts.reads == before, "the hottest stay"


def test_all_that_a_step_needs_is_read_at_once(make_level, monkeypatch):
    level, together = make_level(share(0.8), depth=3), threading.Barrier(3, timeout=20)
    fill = FileStore._fill
    monkeypatch.setattr(FileStore, "_fill", lambda *arguments, **more: (together.wait(), fill(*arguments, **more)))
    level.reads.expect(0, [BlobKey(0, expert, 4) for expert in range(3)])
    read(level, BlobKey(0, 0, 4))  # a barrier that three reads pass together, or none


def test_a_guess_waits_for_demand_and_is_dropped_by_it(make_level, monkeypatch):
    level, go, order = make_level(share(0.8), depth=1), threading.Event(), []
    fill = FileStore._fill

    def slow(self, key, *arguments, **more):
        go.wait(20)
        order.append(key.expert)
        return fill(self, key, *arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", slow)
    level.reads.expect(0, [BlobKey(0, 0, 4)])
    level.reads.prefetch([BlobKey(1, expert, 4) for expert in (1, 2)])
    level.reads.expect(0, [BlobKey(0, 3, 4)])
    go.set()
    read(level, BlobKey(0, 3, 4))
    assert set(order) == {0, 3}
    assert level.slots.counts.guesses.dropped == 2
    level.reads.prefetch([BlobKey(1, 2, 4)])
    read(level, BlobKey(1, 2, 4))
    assert level.slots.counts.guesses.useful == 1


@pytest.mark.parametrize("refuse", [0, 1, None])
def test_what_cannot_be_locked_is_held_all_the_same(make_level, monkeypatch, refuse):
    monkeypatch.setattr("vllm_dymoe.transfer.level_slots._CHUNK", 64 << 10)
    lock = RecordedLock(refuse=refuse)
    level = make_level(share(1), lock)
    assert level.slots.locked == sum(lock.locked.values())
    assert (level.slots.locked == level.slots.nbytes) == (refuse is None)
    with level.hold(BlobKey(0, 0, 4)) as held:
        assert held.locked == any(at <= held.blob.data_ptr() < at + n for at, n in lock.locked.items())
    assert ("staging buffers" in level.description) == (refuse is not None)
    level.close()
    assert not lock.locked


def test_budgets_that_cannot_work_are_refused_and_others_taken(make_level):
    with pytest.raises(HostMemoryError, match=f"set host_memory to at least {smallest_level(EXPERTS)} bytes"):
        make_level(smallest_level(EXPERTS) - 1)
    level = make_level(share(0.5))
    for nbytes in (share(1), smallest_level(EXPERTS), share(0.3)):
        level.resize(nbytes)
        assert (level.slots.limit, len(level.slots.held)) == (nbytes, 0)
        read(level, BlobKey(0, 0, 4))
        level.check_integrity()
    with pytest.raises(HostMemoryError):
        level.resize(1)
    read(level, BlobKey(0, 0, 4))
    assert level.slots.limit == share(0.3)


def test_a_slice_that_cannot_be_read_fails_alone_and_is_tried_again(make_level, folder, monkeypatch):
    level, key, fill, broken = make_level(share(0.5)), BlobKey(1, 3, 4), FileStore._fill, [True]

    def fails(self, asked, *arguments, **more):
        if asked == key and broken[0]:
            raise StoreError("the disk is gone")
        return fill(self, asked, *arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", fails)
    for _ in range(3):
        level.reads.expect(1, [key, BlobKey(1, 4, 4)])
        with pytest.raises(StoreError, match="the disk is gone"):
            read(level, key)
        read(level, BlobKey(1, 4, 4))
        level.check_integrity()
    broken[0] = False
    assert torch.equal(read(level, key), read(level.files, key))


def test_a_read_that_hangs_fails_what_waits_for_it_and_gives_its_slot_back_when_it_ends(make_level, monkeypatch):
    level, key, fill, go = make_level(share(0.5), timeout=0.2), BlobKey(1, 3, 4), FileStore._fill, threading.Event()
    monkeypatch.setattr(
        FileStore, "_fill", lambda self, asked, *a, **b: (asked == key and go.wait(20), fill(self, asked, *a, **b))
    )
    with pytest.raises(StoreError, match="took longer than transfer_timeout_s"):
        read(level, key)
    for expert in (0, 1, 2, 4):
        read(level, BlobKey(1, expert, 4))
    with pytest.raises(HostMemoryError, match="have not ended"):
        level.resize(share(0.4))
    go.set()
    for _ in range(1000):
        if not level.slots.orphans:
            break
        threading.Event().wait(0.01)
        level.reads.expect(0, [])
    level.check_integrity()
    level.resize(share(0.4))


def test_other_bytes_are_found_when_they_enter_memory_and_always_where_that_is_asked_for(tmp_path):
    files = write(tmp_path / "store", EXPERTS)
    level, key = HostLevel(files, smallest_level(EXPERTS)), BlobKey(0, 1, 4)
    read(level, key)
    damage(files.folder / file_name(1), files._begin(key) + 100, b"\xff\xfe\xff")
    for check, found in (("first", False), ("always", True)):
        files.reading = Reading(check=check)
        for expert in (4, 5, 6):  # push it out
            read(level, BlobKey(0, expert, 4))
        assert not level.reads.has(key)
        if found:
            with pytest.raises(StoreError, match="corrupted: the gate projection of expert 1"):
                read(level, key)
        else:
            read(level, key)
    level.close()


@pytest.mark.parametrize("part", [0.2, 0.6])
def test_a_level_below_a_device_changes_no_bit(make_level, part):
    want = run(make_runtime(FileStore(make_level(share(1)).files.folder), "100%"), STEPS)
    level = make_level(share(part))
    runtime = make_runtime(level, "25%", link_gbps=50.0)
    for got, expected in zip(run(runtime, STEPS), want, strict=True):
        assert torch.equal(got, expected)
    stats = runtime.stats()
    assert stats.host_hits > 0
    assert 0 < stats.host_misses <= stats.disk_reads < stats.misses + stats.host_guesses["made"] + 1
    resize_host_memory(runtime, smallest_level(EXPERTS))
    for got, expected in zip(run(runtime, STEPS), want, strict=True):
        assert torch.equal(got, expected)
    runtime.close()


@pytest.mark.parametrize("decisions", ["host", "device"])
def test_all_in_memory_is_a_store_that_the_device_reads_by_itself(make_level, folder, decisions):
    """And what holds a part leaves narrow and wide steps alike to the host: no device waits for a disk."""
    want = run(make_runtime(FileStore(folder), "100%"), STEPS)
    level = make_level(share(1))
    with pytest.raises(ConfigError, match="not all experts are in host memory"):
        make_runtime(level, "25%", decisions="device")
    level.fill()
    runtime = make_runtime(level, "25%", decisions=decisions)
    got = run_decided(runtime, STEPS) if decisions == "device" else run(runtime, STEPS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    stats = runtime.stats()
    assert (stats.misses > 0, stats.host_misses, level.files.counts.reads) == (True, 0, len(list(all_keys(EXPERTS))))
    assert runtime.level is None
    runtime.close()


@pytest.mark.parametrize(("model", "draft"), [(1, 1), (0.5, 0.5), (0.5, 0), (0, 0.5), (1, 0)])
def test_a_drafts_level_is_the_models(make_level, model, draft):
    """What is whole stays so and is not read again; elsewhere stats and resizing see one level of both."""
    stores = []
    for part in (model, draft):
        level = make_level(share(part or 1))
        if part == 1:
            level.fill()
        stores.append(level if part else level.release())
    reads = [store.files.counts.reads if isinstance(store, HostLevel) else 0 for store in stores]
    alone = {key: read(store, key) for store in stores[:1] for key in all_keys(EXPERTS)} if model == 1 else {}
    both = join(*stores)
    assert both.experts.layers == (1, 2, 3, 5, 6, 7)
    files = both.files if isinstance(both, HostLevel) else both
    for key in all_keys(EXPERTS):
        for shift in (0, 3):
            got = read(both, replace(key, layer=key.layer + shift))
            assert torch.equal(got, alone.get(key, got))
            assert torch.equal(got, read(both, key))
    if (model, draft) == (1, 1):
        assert both.whole
        assert files.counts.reads == reads[0]
    if model:
        budget = sum(share(part) for part in (model, draft))
        assert (both.whole, both.slots.limit) == (draft == 1, budget)
        runtime = make_runtime(both, "25%", link_gbps=50.0)
        run(runtime, STEPS)
        both.check_integrity()
        if not both.whole:
            assert 0 < runtime.stats().host_bytes <= budget
            resize_host_memory(runtime, share(0.4))
            run(runtime, STEPS)
            assert runtime.stats().host_bytes <= share(0.4)
        runtime.engine.close()


def test_a_disk_that_fails_fails_its_step_and_no_other(make_level, monkeypatch):
    runtime, fill, broken = make_runtime(make_level(share(0.4)), "25%", link_gbps=50.0), FileStore._fill, [False]

    def fails(*arguments, **more):
        if broken[0]:
            raise StoreError("the disk is gone")
        return fill(*arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", fails)
    before = run(runtime, STEPS[:3])
    broken[0] = True
    with pytest.raises(TransferError, match="the disk is gone"):
        run(runtime, [(seed, 2, 7) for seed in range(40)])
    broken[0] = False
    runtime.check_integrity()
    for got, expected in zip(run(runtime, STEPS[:3]), before, strict=True):
        assert torch.equal(got, expected)
    runtime.close()
