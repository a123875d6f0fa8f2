"""The host cache returns the bytes of the files, within its budget.

This holds for any order of requests.
"""

import os
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.cache.store.pinners import RecordedPinner
from tests.cache.store.stores import damage, read, write
from tests.executor.device_planned import run_device_planned, run_on_card
from tests.executor.steps import STEPS, make_server, run
from tests.small_model import make_experts
from vllm_dymoe.cache.host_cache import HostCache, join
from vllm_dymoe.cache.store import FileStore, HostMemoryError, StoreError, smallest_host_cache, whole_host_cache
from vllm_dymoe.cache.store.disk import Reading
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.experts.format import SliceKey, all_keys, layer_keys
from vllm_dymoe.planner.precision import Precision

EXPERTS = make_experts(layers=3, num_experts=8, top_k=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host_cache") / "store"
    write(folder, EXPERTS).close()
    return folder


@pytest.fixture
def make_host_cache(folder):
    made = []

    def make(nbytes, pinner=None, timeout=None, depth=3):
        files = FileStore(folder)
        files.reading = Reading(depth=depth)
        made.append(HostCache(files, nbytes, pinner, timeout))
        return made[-1]

    yield make
    for host_cache in made:
        host_cache.close()


def share(part):
    return int(whole_host_cache(EXPERTS) * part)


@pytest.mark.parametrize("nbytes", [smallest_host_cache(EXPERTS), share(0.3), share(0.7), share(1)])
def test_every_slice_is_the_files_whatever_was_asked_before_and_the_budget_is_kept(make_host_cache, folder, nbytes):
    host_cache, files, random_ = make_host_cache(nbytes), FileStore(folder), random.Random(nbytes)
    keys = list(all_keys(EXPERTS))
    want = {key: read(files, key) for key in keys}
    assert host_cache.slots.nbytes <= nbytes
    errors = []

    def ask(seed):
        mine = random.Random(seed)
        try:
            for _ in range(60):
                key = mine.choice(keys)
                assert torch.equal(read(host_cache, key), want[key])
        except Exception as error:
            errors.append(error)

    for round_ in range(4):
        layer = random_.randrange(3)
        host_cache.expect(layer, random_.sample(list(layer_keys(EXPERTS, layer)), 5))
        threads = [threading.Thread(target=ask, args=(4 * round_ + number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        host_cache.check_integrity()
    files.close()


def test_what_fits_is_read_once_and_what_does_not_is_kept_by_score(make_host_cache):
    host_cache = make_host_cache(share(1))
    host_cache.fill()
    assert host_cache.whole
    assert (len(host_cache.slots.held), host_cache.files.counts.reads) == (len(list(all_keys(EXPERTS))),) * 2
    read(host_cache, SliceKey(2, 7, 4))
    assert host_cache.files.counts.reads == len(list(all_keys(EXPERTS)))
    host_cache = make_host_cache(share(0.5))
    hot = [SliceKey(1, 2, 4), SliceKey(1, 5, 4)]
    for cold in range(40):
        asked = {*hot, SliceKey(1, cold % 8, 4)}
        host_cache.expect(1, list(asked))
        for key in asked:
            read(host_cache, key)
    before, kept = host_cache.files.counts.reads, host_cache.slots.fetchers[4].cache.table.residents(Precision.HIGH)
    assert {(key.layer, key.expert) for key in hot} <= kept
    for key in hot:
        read(host_cache, key)
    assert host_cache.files.counts.reads == before, "the hottest stay"


def test_a_bound_caller_reads_everything_on_all_cores(make_host_cache, monkeypatch):
    host_cache, read_into, found, free = make_host_cache(share(1)), FileStore.read_into, set(), threading.Event()

    def noted(*arguments):
        found.add(frozenset(os.sched_getaffinity(0)))
        read_into(*arguments)

    monkeypatch.setattr(FileStore, "read_into", noted)
    cores = os.sched_getaffinity(0)
    threading.Thread(target=free.wait).start()
    os.sched_setaffinity(0, {min(cores)})
    try:
        host_cache.fill()
    finally:
        os.sched_setaffinity(0, cores)
        free.set()
    assert found == {frozenset(cores)}


def test_all_that_a_step_needs_is_read_at_once(make_host_cache, monkeypatch):
    host_cache, together = make_host_cache(share(0.8), depth=3), threading.Barrier(3, timeout=60)
    fill = FileStore._fill
    monkeypatch.setattr(FileStore, "_fill", lambda *arguments, **more: (together.wait(), fill(*arguments, **more)))
    host_cache.expect(0, [SliceKey(0, expert, 4) for expert in range(3)])
    read(host_cache, SliceKey(0, 0, 4))  # the barrier times out unless three reads are in progress


def test_a_slot_is_read_into_behind_the_last_copy_out_of_it(make_host_cache, monkeypatch):
    host_cache, keys, order = make_host_cache(smallest_host_cache(EXPERTS)), list(layer_keys(EXPERTS, 0)), []
    fill = FileStore._fill

    def noted(self, key, *arguments, **more):
        order.append(key)
        return fill(self, key, *arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", noted)
    for key in keys[:2]:
        with host_cache.hold(key) as held:
            held.last_read = SimpleNamespace(synchronize=lambda: order.append("copy has ended"))
    read(host_cache, keys[2])
    assert order == [*keys[:2], "copy has ended", keys[2]]


@pytest.mark.parametrize("refuse", [0, 1, None])
def test_what_cannot_be_locked_is_held_all_the_same(make_host_cache, monkeypatch, refuse):
    monkeypatch.setattr("vllm_dymoe.cache.host_slots._CHUNK", 64 << 10)
    pinner = RecordedPinner(refuse=refuse)
    host_cache = make_host_cache(share(1), pinner)
    assert host_cache.slots.pinned == sum(pinner.pinned.values())
    assert (host_cache.slots.pinned == host_cache.slots.nbytes) == (refuse is None)
    with host_cache.hold(SliceKey(0, 0, 4)) as held:
        assert held.pinned == any(at <= held.packed.data_ptr() < at + n for at, n in pinner.pinned.items())
    assert ("staging buffers" in host_cache.description) == (refuse is not None)
    host_cache.close()
    assert not pinner.pinned


def test_budgets_that_cannot_work_are_refused_and_others_taken(make_host_cache):
    with pytest.raises(HostMemoryError, match=f"at least {smallest_host_cache(EXPERTS)} bytes"):
        make_host_cache(smallest_host_cache(EXPERTS) - 1)
    host_cache = make_host_cache(share(0.5))
    for nbytes in (share(1), smallest_host_cache(EXPERTS), share(0.3)):
        host_cache.resize(nbytes)
        assert (host_cache.slots.limit, len(host_cache.slots.held)) == (nbytes, 0)
        read(host_cache, SliceKey(0, 0, 4))
        host_cache.check_integrity()
    held = dict(host_cache.slots.held)
    with pytest.raises(HostMemoryError):
        host_cache.resize(1)
    assert host_cache.slots.held == held != {}
    read(host_cache, SliceKey(0, 0, 4))
    assert host_cache.slots.limit == share(0.3)


def test_a_slice_that_cannot_be_read_fails_alone_and_is_tried_again(make_host_cache, folder, monkeypatch):
    host_cache, key, fill, broken = make_host_cache(share(0.5)), SliceKey(1, 3, 4), FileStore._fill, [True]

    def fails(self, asked, *arguments, **more):
        if asked == key and broken[0]:
            raise StoreError("the disk is gone")
        return fill(self, asked, *arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", fails)
    for _ in range(3):
        host_cache.expect(1, [key, SliceKey(1, 4, 4)])
        with pytest.raises(StoreError, match="the disk is gone"):
            read(host_cache, key)
        read(host_cache, SliceKey(1, 4, 4))
        host_cache.check_integrity()
    broken[0] = False
    assert torch.equal(read(host_cache, key), read(host_cache.files, key))


def test_a_read_that_hangs_fails_what_waits_for_it_and_gives_its_slot_back_when_it_ends(make_host_cache, monkeypatch):
    host_cache, key, fill, go = (
        make_host_cache(share(0.5), timeout=0.5),
        SliceKey(1, 3, 4),
        FileStore._fill,
        threading.Event(),
    )
    monkeypatch.setattr(
        FileStore, "_fill", lambda self, asked, *a, **b: (asked == key and go.wait(60), fill(self, asked, *a, **b))
    )
    with pytest.raises(StoreError, match="transfer_timeout_s"):
        read(host_cache, key)
    for expert in (0, 1, 2, 4):
        read(host_cache, SliceKey(1, expert, 4))
    with pytest.raises(HostMemoryError, match="have not ended"):
        host_cache.resize(share(0.4))
    go.set()
    for _ in range(1000):
        if not host_cache.slots.orphans:
            break
        threading.Event().wait(0.01)
        host_cache.expect(0, [])
    host_cache.check_integrity()
    host_cache.resize(share(0.4))


def lose_a_slot(cache, row):
    cache.pools[Precision.HIGH].take(kept=False)


def forget_what_is_kept(cache, row):
    cache.table.remove(*row)


def reserve_another_slot(cache, row):
    pool = cache.pools[Precision.HIGH]
    pool.lend(pool.slots[0])


@pytest.mark.parametrize("plant", [lose_a_slot, forget_what_is_kept, reserve_another_slot])
def test_slots_that_do_not_add_up_are_found(make_host_cache, plant):
    host_cache, key = make_host_cache(share(0.5)), SliceKey(1, 3, 4)
    host_cache.expect(1, [key])
    read(host_cache, key)
    host_cache.check_integrity()
    plant(host_cache.slots.fetchers[4].cache, (1, 3))
    with pytest.raises(AssertionError):
        host_cache.check_integrity()


@pytest.mark.parametrize("check", ["first", "always"])
def test_other_bytes_are_found_whenever_they_enter_memory(tmp_path, check):
    files = write(tmp_path / "store", EXPERTS)
    files.reading = Reading(check=check)
    host_cache, key = HostCache(files, smallest_host_cache(EXPERTS)), SliceKey(0, 1, 4)
    read(host_cache, key)
    damage(files.folder / file_name(1), files._begin(key) + 100, b"\xff\xfe\xff")
    for expert in (4, 5, 6):  # evict it
        read(host_cache, SliceKey(0, expert, 4))
    assert key not in host_cache.slots.held
    with pytest.raises(StoreError, match="corrupted: the gate projection of expert 1"):
        read(host_cache, key)
    host_cache.close()


@pytest.mark.parametrize("part", [0.2, 0.6])
def test_a_level_below_a_device_changes_no_bit(make_host_cache, part):
    want = run(make_server(FileStore(make_host_cache(share(1)).files.folder), "100%"), STEPS)
    host_cache = make_host_cache(share(part))
    server = make_server(host_cache, "25%", link_gbps=50.0)
    for got, expected in zip(run_on_card(server, STEPS), want, strict=True):
        assert torch.equal(got, expected)
    stats = server.stats()
    assert stats.host_hits > 0
    assert 0 < stats.host_misses <= stats.disk_reads <= stats.misses
    server.resize_host_memory(smallest_host_cache(EXPERTS))
    for got, expected in zip(run_on_card(server, STEPS), want, strict=True):
        assert torch.equal(got, expected)
    server.close()


@pytest.mark.parametrize("link_gbps", [None, 50.0], ids=["host", "device"])
def test_all_in_memory_is_a_store_that_the_device_reads_by_itself(make_host_cache, folder, link_gbps):
    """Once all experts are in host memory, nobody reads the disk again."""
    want = run(make_server(FileStore(folder), "100%"), STEPS)
    host_cache = make_host_cache(share(1))
    host_cache.fill()
    server = make_server(host_cache, "25%", link_gbps=link_gbps)
    got = run_device_planned(server, STEPS) if link_gbps else run(server, STEPS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))
    stats = server.stats()
    assert (stats.misses > 0, stats.host_misses, host_cache.files.counts.reads) == (
        True,
        0,
        len(list(all_keys(EXPERTS))),
    )
    assert server.host_cache is None
    server.close()


@pytest.mark.parametrize(("model", "draft"), [(1, 1), (0.5, 0.5), (0.5, 0), (0, 0.5), (1, 0)])
def test_a_drafts_level_is_the_models(make_host_cache, model, draft):
    """A model and its draft share one host cache.

    If both are complete, so is the shared one, and nothing is read again. Otherwise statistics and resizing see a
    single cache.
    """
    stores = []
    for part in (model, draft):
        host_cache = make_host_cache(share(part or 1))
        if part == 1:
            host_cache.fill()
        stores.append(host_cache if part else host_cache.release())
    reads = [store.files.counts.reads if isinstance(store, HostCache) else 0 for store in stores]
    alone = {key: read(store, key) for store in stores[:1] for key in all_keys(EXPERTS)} if model == 1 else {}
    both = join(*stores)
    assert both.experts.layers == (1, 2, 3, 5, 6, 7)
    files = both.files if isinstance(both, HostCache) else both
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
        server = make_server(both, "25%", link_gbps=50.0)
        run_on_card(server, STEPS)
        both.check_integrity()
        if not both.whole:
            assert 0 < server.stats().host_bytes <= budget
            server.resize_host_memory(share(0.4))
            run_on_card(server, STEPS)
            assert server.stats().host_bytes <= share(0.4)
        server.engine.close()


def test_a_disk_that_fails_fails_its_step_and_no_other(make_host_cache, monkeypatch):
    server, fill, broken = make_server(make_host_cache(share(0.4)), "25%"), FileStore._fill, [False]

    def fails(*arguments, **more):
        if broken[0]:
            raise StoreError("the disk is gone")
        return fill(*arguments, **more)

    monkeypatch.setattr(FileStore, "_fill", fails)
    before = run(server, STEPS[:3])
    broken[0] = True
    with pytest.raises(TransferError, match="the disk is gone"):
        run(server, [(seed, 2, 7) for seed in range(40)])
    broken[0] = False
    server.check_integrity()
    for got, expected in zip(run(server, STEPS[:3]), before, strict=True):
        assert torch.equal(got, expected)
    server.close()
