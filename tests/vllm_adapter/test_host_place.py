"""Experts in memory: filled from files with progress, and left in files where memory cannot be had."""

import pytest
import torch

from tests.small_model import make_experts
from tests.store.locks import RecordedLock
from vllm_dymoe.experts.layout import all_keys
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.store import FileStore, Manifest, MemoryStore, StoreError, memory_bytes
from vllm_dymoe.store.placement import HostPlace
from vllm_dymoe.store.writer import StoreWriter
from vllm_dymoe.vllm_adapter import host_place
from vllm_dymoe.vllm_adapter.host_place import place_experts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PINNED = HostPlace(True, "auto: there is room")


@pytest.fixture
def files(tmp_path):
    experts = make_experts()
    store = random_store(experts, StoreWriter(tmp_path / "store", Manifest(experts, "dummy", "a model")), seed=1)
    yield store
    store.close()


@pytest.fixture
def lock(monkeypatch):
    lock = RecordedLock()
    monkeypatch.setattr(host_place, "CudaPageLock", lambda device: lock)
    return lock


def test_files_stay_files(files, lock):
    assert place_experts(files, HostPlace(False), CUDA, asked_for=False) == (files, HostPlace(False))
    assert lock.calls == []


@pytest.mark.parametrize(("device", "locked"), [(CPU, 0), (CUDA, 2)])
def test_memory_is_filled_and_locked_where_there_is_a_gpu(files, lock, device, locked, capsys):
    with_files = FileStore(files.folder)
    store, place = place_experts(files, PINNED, device, asked_for=False)
    assert isinstance(store, MemoryStore)
    assert place == PINNED
    assert len(lock.locked) == locked
    for key in all_keys(store.experts):
        blob = torch.empty(store.experts.formats[key.bits].nbytes, dtype=torch.uint8)
        with_files.read_into(key, blob)
        assert torch.equal(store.blob(key), blob)
    with_files.close()
    assert "Reading experts into memory: 100%" in capsys.readouterr().err
    store.close()


def test_memory_that_cannot_be_locked_is_refused_where_it_was_asked_for(files, lock):
    lock._refuse = 1
    sentence = r"locking failed at layer 2 \(CUDA error 2: out of memory\).*; use host_store = \"file\", or \"auto\"\."
    with pytest.raises(StoreError, match=sentence):
        place_experts(files, HostPlace(True), CUDA, asked_for=True)
    assert not lock.locked


def test_and_otherwise_files_serve_and_the_line_says_why(files, lock):
    lock._refuse = 0
    store, place = place_experts(files, PINNED, CUDA, asked_for=False)
    assert store is files
    assert not place.pinned
    assert place.reason.startswith(f"auto: the experts need {memory_bytes(files.experts)} bytes of page-locked")
    assert "CUDA error 2: out of memory" in place.reason


def test_damaged_files_are_no_reason_to_go_on(files, lock):
    path = next(files.folder.glob("*.safetensors"))
    with path.open("r+b") as file:
        file.seek(4096 + 10)
        file.write(b"\xff\xfe\xff\xfe")
    with pytest.raises(StoreError, match="corrupted"):
        place_experts(files, PINNED, CUDA, asked_for=False)
    assert not lock.locked
