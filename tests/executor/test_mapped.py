"""Experts in files on a CPU: computed from the page cache, otherwise fetched."""

import os
import random

import pytest
import torch

from tests.cache.store.stores import damage, read, write
from tests.executor.steps import BUDGETS, STEPS, ByNumber, run, with_budget
from tests.small_model import make_experts
from vllm_dymoe.cache.store import FileStore
from vllm_dymoe.cache.store.disk import Reading
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.executor import cpu_executor
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.kernels import native
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.policies.dymoe import Dymoe

pytestmark = pytest.mark.skipif(native.load() is None, reason="mappings are guarded by the native library")


@pytest.fixture(params=[False, True], ids=["two versions", "nested"])
def files(tmp_path, request):
    write(tmp_path / "store", make_experts(layers=2, nested=request.param))
    store = FileStore(tmp_path / "store")
    yield store
    store.close()


def forget(store, layer=0):
    """Remove all pages of a layer's file from the page cache."""
    store._maps.clear()  # pages stay while a process maps them
    file = store._layers[layer].file
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def test_bytes_are_those_of_the_file_and_known_to_be_in_memory(files):
    for key in all_keys(files.experts):
        want = read(files, key)
        assert files.in_memory(key)
        assert torch.equal(files.packed(key), want)


def test_what_the_page_cache_lacks_is_not_in_memory(files):
    key = next(all_keys(files.experts))
    forget(files)
    if files.mapped and files._maps[0].has(files._begin(key), 4096):
        pytest.skip("this file system keeps its files in memory")
    assert not files.in_memory(key)
    assert read(files, key).any()
    assert files.in_memory(key)


@pytest.mark.parametrize(
    "reading", [Reading(direct=True), Reading(drops=True), Reading(check="always"), Reading(bytes_per_second=1e9)]
)
def test_files_that_are_read_in_another_way_are_not_mapped(files, reading):
    assert files.mapped
    files.reading = reading
    assert not files.mapped
    assert not files.in_memory(next(all_keys(files.experts)))


@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_no_budget_changes_a_bit_and_nothing_is_copied(files, budget):
    policy = ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))
    want = run(with_budget(files, "100%", policy, misses="fetch"), STEPS)
    server = with_budget(files, budget, policy, misses="compute")
    for _ in range(2):
        server.reset_stats()
        got = run(server, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    stats = server.stats()
    assert stats.cpu_executed == stats.misses > 0
    assert sum(stats.transfers.values()) == 0
    server.check_integrity()


def test_what_is_not_in_memory_is_fetched_and_kept_by_the_rule(files, monkeypatch):
    policy = ByNumber(low=frozenset({0, 3}))
    want = with_budget(files, "25%", policy, misses="fetch")
    server = with_budget(files, "25%", policy, misses="compute")
    monkeypatch.setattr(files, "in_memory", lambda key: False)
    assert all(torch.equal(a, b) for a, b in zip(run(want, STEPS), run(server, STEPS), strict=True))
    assert server.stats().cpu_executed == 0
    assert server.stats().to_dict().items() >= {"hits": want.stats().hits, "misses": want.stats().misses}.items()
    assert (server.cache.table.precision == want.cache.table.precision).all()


def test_damage_is_no_answer(files):
    key = next(all_keys(files.experts))
    damage(files._layers[0].path, files._begin(key) + 100, b"\xff" * 100)
    assert not files.in_memory(key)
    with pytest.raises(TransferError, match="checksum"):
        run(with_budget(files, "minimum", misses="compute"), STEPS)


def test_a_file_that_is_cut_off_in_the_middle_of_a_step_fails_it_and_the_process_goes_on(files):
    """The pages are in memory when the server checks, and gone afterwards."""
    server = with_budget(files, "minimum", low=0, misses="compute")
    run(server, STEPS)
    for layer in range(2):
        os.truncate(files._layers[layer].path, 4096)
    with pytest.raises(TransferError, match="the file was truncated"):
        run(server, STEPS)
    assert not files.mapped
    with pytest.raises(TransferError, match="the file was truncated"):
        run(server, STEPS)
    server.check_integrity()


def test_after_lost_pages_everything_is_fetched(files):
    """A server that is resized later knows of the loss as well.

    Once it checked the same experts forever.
    """
    server = with_budget(files, "minimum", low=0, misses="compute")
    want = run(server, STEPS)
    path = files._layers[1].path
    whole = path.read_bytes()
    os.truncate(path, 4096)
    with pytest.raises(TransferError, match="the file was truncated"):
        run(server, STEPS)
    path.write_bytes(whole)
    server.resize("50%")
    server.reset_stats()
    assert all(torch.equal(a, b) for a, b in zip(want, run(server, STEPS), strict=True))
    assert server.stats().cpu_executed == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("share_in_memory", [0, 0.5])
def test_a_step_ends_whatever_is_in_memory(files, monkeypatch, share_in_memory):
    """It once looped forever: one expert was on disk while another was unchecked."""
    steps = [(seed, seed % 2, 1 + seed % 3) for seed in range(60)]
    want = run(with_budget(files, "minimum", Dymoe(retention=0.5), misses="fetch"), steps)
    server = with_budget(files, "minimum", Dymoe(retention=0.5), misses="compute")
    answers, has = random.Random(7), files.in_memory
    monkeypatch.setattr(files, "in_memory", lambda key: answers.random() < share_in_memory and has(key))
    assert all(torch.equal(a, b) for a, b in zip(want, run(server, steps), strict=True))


def test_a_file_that_is_written_to_while_it_is_served_is_verified_again(files, monkeypatch):
    monkeypatch.setattr(cpu_executor, "_SECONDS", 0.0)
    server = with_budget(files, "minimum", low=0, misses="compute")
    server.host_planned.begin_step(Phase.DECODE)
    run(server, STEPS)
    for key in all_keys(files.experts):
        damage(files._layers[key.layer].path, files._begin(key) + 100, b"\xff" * 100)
    server.host_planned.begin_step(Phase.DECODE)
    with pytest.raises(TransferError, match="checksum"):
        run(server, STEPS)
    server.check_integrity()
