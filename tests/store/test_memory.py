"""Stores in host memory: filled from files, locked, and undone when that fails."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from tests.small_model import make_experts
from tests.store.locks import RecordedLock
from tests.store.stores import damage
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.residency.format import all_keys
from vllm_dymoe.store import FileStore, Manifest, MemoryStore, StoreError, memory_bytes, page_lock
from vllm_dymoe.store.files import file_name
from vllm_dymoe.store.writer import StoreWriter


def test_a_whole_file_store_goes_into_memory(store, memory_store):
    copy = MemoryStore.from_files(store)
    assert all(torch.equal(copy.blob(key), memory_store.blob(key)) for key in all_keys(store.experts))


def test_too_little_host_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr("vllm_dymoe.store.memory.available_host_memory", lambda: 1000)
    with pytest.raises(StoreError, match=rf"need {memory_bytes(make_experts())} bytes of host memory, but 1000 are"):
        MemoryStore(make_experts())


@pytest.fixture
def large(tmp_path):
    """Files of 20 MiB in three layers, none of which is a whole number of pages."""
    experts = make_experts(layers=3, num_experts=7, hidden=512, intermediate=352, bits=(16, 4))
    random_store(experts, StoreWriter(tmp_path / "large", Manifest(experts, "dummy", "a model")), seed=1).close()
    store = FileStore(tmp_path / "large")
    yield store
    store.close()


def test_memory_is_locked_layer_by_layer_and_takes_what_was_promised(large):
    lock, read = RecordedLock(), []
    before = rss()
    store = MemoryStore.from_files(large, lock, read.append)
    promised = sum(large.experts.nbytes(bits) for bits in large.experts.formats)
    assert promised <= sum(lock.locked.values()) == memory_bytes(large.experts) < promised + 3 * mmap.PAGESIZE
    assert [what for what, _ in lock.calls] == ["lock"] * 3
    assert sum(read) == promised
    grown = rss() - before
    assert grown < promised + 8 * 2**20, "threads and their buffers take some"
    for key in all_keys(large.experts):
        assert torch.equal(store.blob(key), read_blob(large, key))
        assert store.blob(key).data_ptr() % 256 == 0
        assert any(address <= store.blob(key).data_ptr() < address + n for address, n in lock.locked.items())
    before = rss()
    store.close()
    assert not lock.locked
    gc.collect()
    assert before - rss() > 0.9 * promised, "the memory is the system's again"


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def read_blob(store, key):
    blob = torch.full((store.experts.formats[key.bits].nbytes,), 0xEE, dtype=torch.uint8)
    store.read_into(key, blob)
    return blob


def test_a_layer_is_complete_when_it_is_locked(large):
    """Locking makes pages that are not there yet one by one, where threads that fill them do it side by side."""
    lock, read = RecordedLock(), []
    layer = sum(large.experts.num_experts * fmt.nbytes for fmt in large.experts.formats.values())
    inner = lock.lock

    def locked(address, nbytes):
        assert sum(read) == layer * (len(lock.calls) + 1)
        return inner(address, nbytes)

    lock.lock = locked
    MemoryStore.from_files(large, lock, read.append).close()


@pytest.mark.parametrize("refuse", [0, 2])
def test_memory_that_cannot_be_locked_is_undone_and_named(large, monkeypatch, refuse):
    monkeypatch.setattr("resource.getrlimit", lambda which: (65536, 65536))
    lock = RecordedLock(refuse=refuse)
    with pytest.raises(StoreError) as caught:
        MemoryStore.from_files(large, lock)
    sentence = str(caught.value)
    assert f"need {memory_bytes(large.experts)} bytes of page-locked host memory" in sentence
    assert f"failed at layer {refuse + 1} (CUDA error 2: out of memory)" in sentence
    assert sentence.endswith("the limit on locked memory (ulimit -l) is 65536 bytes")
    assert not lock.locked
    assert [what for what, _ in lock.calls] == ["lock"] * refuse + ["unlock"] * refuse


def test_files_that_are_damaged_leave_nothing_locked(large):
    damage(large.folder / file_name(3), 4096 + 100, b"\xff\xfe\xff")
    lock = RecordedLock()
    with pytest.raises(StoreError, match=r"00003.*corrupted"):
        MemoryStore.from_files(FileStore(large.folder), lock)
    assert not lock.locked
    assert len(lock.calls) == 4


def test_memory_says_where_it_is(large, monkeypatch):
    assert MemoryStore.from_files(large, RecordedLock()).description == "page-locked host memory"
    monkeypatch.setattr(page_lock, "prefer_node", lambda memory, node: None)
    assert MemoryStore(large.experts, RecordedLock(node=1)).description.endswith("on NUMA node 1")
    monkeypatch.setattr(page_lock, "prefer_node", lambda memory, node: "Operation not permitted")
    description = MemoryStore(large.experts, RecordedLock(node=1)).description
    assert "not near the GPU on NUMA node 1 (Operation not permitted)" in description
