"""Stores in host memory: filled from files, pinned, or refused where it is short.

If filling or pinning fails, nothing stays pinned.
"""

import gc
import mmap
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cache.store.pinners import RecordedPinner
from tests.cache.store.stores import damage, read
from tests.small_model import make_experts
from vllm_dymoe.cache import slots
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import FileStore, Manifest, StoreError, smallest_host_cache, whole_host_cache
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.memory import HostRoom, choose_host_place
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.options import ExpertBudget
from vllm_dymoe.quantize.dummy import random_store


@pytest.fixture
def large(tmp_path):
    """Create 20 MiB of files in three layers whose sizes are not multiples of a page."""
    experts = make_experts(layers=3, num_experts=7, hidden=512, intermediate=352, bits=(16, 4))
    random_store(experts, StoreWriter(tmp_path / "large", Manifest(experts, "dummy", "a model")), seed=1).close()
    store = FileStore(tmp_path / "large")
    yield store
    store.close()


@pytest.mark.parametrize("refuse", [None, 2])
def test_memory_takes_what_was_reserved_and_goes_back_to_the_policy(large, refuse, monkeypatch):
    monkeypatch.setattr("vllm_dymoe.cache.host_slots._CHUNK", 4 << 20)
    pinner, told = RecordedPinner(refuse=refuse), []
    reserved = sum(large.experts.nbytes(bits) for bits in large.experts.formats)
    before = rss()
    store = HostCache(large, whole_host_cache(large.experts), pinner)
    assert not store.readable
    store.fill(told.append)
    assert sum(told) == reserved
    assert store.readable == (refuse is None)
    assert reserved <= store.slots.nbytes == whole_host_cache(large.experts) < reserved + len(told) * mmap.PAGESIZE
    assert sum(pinner.pinned.values()) == store.slots.pinned
    assert rss() - before < reserved + 8 * 2**20, "threads and their buffers take some"
    for key in all_keys(large.experts):
        assert torch.equal(store.packed(key), read(large, key))
        assert store.packed(key).data_ptr() % 256 == 0
        with store.hold(key) as held:
            assert held.pinned == any(at <= held.packed.data_ptr() < at + n for at, n in pinner.pinned.items())
    before = rss()
    del held
    store.close()
    assert not pinner.pinned
    gc.collect()
    assert before - rss() > 0.9 * reserved, "the memory is the policy's again"


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_files_that_are_damaged_leave_nothing_pinned(large):
    damage(large.folder / file_name(3), 4096 + 100, b"\xff\xfe\xff")
    pinner = RecordedPinner()
    with pytest.raises(StoreError, match=r"00003.*corrupted"):
        HostCache(FileStore(large.folder), whole_host_cache(large.experts), pinner).fill()
    assert pinner.calls
    assert not pinner.pinned


def test_memory_says_where_it_is(large, monkeypatch):
    def described(**pinner):
        host_cache = HostCache(FileStore(large.folder), whole_host_cache(large.experts), RecordedPinner(**pinner))
        said = host_cache.description
        host_cache.close()
        return said

    assert "of host memory (pinned)" in described()
    monkeypatch.setattr(slots, "prefer_node", lambda memory, node: None)
    assert "(pinned, on NUMA node 1)" in described(node=1)
    monkeypatch.setattr(slots, "prefer_node", lambda memory, node: "Operation not permitted")
    assert "not near the GPU on NUMA node 1 (Operation not permitted)" in described(node=1)


GIB = 2**30
# Qwen3-30B-A3B at 4 bits.
LARGE = make_experts(layers=48, num_experts=128, top_k=8, hidden=2048, intermediate=768, bits=(4,), group_size=64)
NEEDED = whole_host_cache(LARGE)


def choose(asked="auto", available=64 * GIB, ranks=1, device="cuda", experts=LARGE, **room):
    return choose_host_place(asked, device, experts, HostRoom(available, ranks, **room))


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_is_not_there_is_refused_with_the_numbers_that_would_fit(ranks):
    available = 9 * GIB * ranks
    with pytest.raises(StoreError) as caught:
        choose("pinned", available=available, ranks=ranks)
    sentence = str(caught.value)
    assert f'host_store = "pinned" needs {NEEDED} bytes' in sentence
    assert f"{9 * GIB} are available" in sentence
    assert ("on each of 2 ranks" in sentence) is (ranks == 2)
    more = int(re.search(r"free (\d+) more", sentence)[1])
    choose("pinned", available=available + more * ranks, ranks=ranks)
    bits, taken = map(int, re.search(r"or high = (\d) and low = 0, which take (\d+)", sentence).groups())
    fits = replace(LARGE, formats={bits: replace(LARGE.formats[4], encoding=encoding_of(bits))})
    assert whole_host_cache(fits) == taken
    choose("pinned", available=available, ranks=ranks, experts=fits)


@pytest.mark.parametrize(
    ("asked", "available", "device", "pinned", "reason"),
    [
        ("auto", 64 * GIB, "cuda", True, "64.0 GiB of host memory are available, of which 6.4 GiB are left"),
        ("auto", 16 * GIB, "cuda", False, "16.0 GiB of host memory are available, of which 2.0 GiB are left"),
        ("auto", NEEDED + 2 * GIB, "cuda", True, ""),
        ("auto", NEEDED + 2 * GIB - 1, "cuda", False, ""),
        ("auto", 64 * GIB, "cpu", False, "auto: there is no CUDA device"),
        ("file", 0, "cuda", False, None),
        ("pinned", NEEDED, "cpu", True, None),
        ("pinned", NEEDED, "cuda", True, None),
    ],
)
def test_experts_live_where_there_is_room_and_the_reason_is_said(asked, available, device, pinned, reason):
    place = choose(asked, available=available, device=device)
    assert place.pinned == pinned
    assert place.reason == "" if reason is None else reason in place.reason
    with pytest.raises(StoreError, match='host_store = "file"'):
        choose("pinned", available=GIB)


@pytest.mark.parametrize(
    ("asked", "room", "pinned", "host_cache"),
    [
        ({}, {"available": 8 * GIB}, False, 6 * GIB),
        ({}, {"available": 40 * GIB, "ranks": 4}, False, 9 * GIB),
        ({}, {"available": 2 * GIB}, False, 0),
        ({"bytes": 5 * GIB}, {}, False, 5 * GIB),
        ({"bytes": 5 * GIB}, {"taken": 2 * GIB}, False, 3 * GIB),
        ({"bytes": 5 * GIB}, {"taken": 5 * GIB}, False, 0),
        ({"bytes": 5 * GIB}, {"device": "cpu"}, False, 5 * GIB),
        ({"bytes": 5 * GIB}, {"device": "cpu", "separate": False}, False, 0),
        ({"share": 0.5}, {}, False, NEEDED // 2),
        ({"share": 1.0}, {}, True, NEEDED),
    ],
)
def test_what_does_not_fit_is_held_in_part(asked, room, pinned, host_cache):
    place = choose(wanted=ExpertBudget(**asked), **room)
    assert (place.pinned, place.host_cache) == (pinned, host_cache)


def test_more_than_there_is_is_refused_and_too_little_is_no_level():
    with pytest.raises(StoreError, match=f"{9 * GIB} bytes .* {8 * GIB}"):
        choose(wanted=ExpertBudget(bytes=9 * GIB), available=16 * GIB, ranks=2)
    assert choose(wanted=ExpertBudget(bytes=smallest_host_cache(LARGE))).host_cache
    assert not choose(wanted=ExpertBudget(bytes=smallest_host_cache(LARGE) - 1)).host_cache
