"""Which packed experts belong to a rank, and where they live: those that are refused, and memory that cannot be had."""

import dataclasses
import os

import pytest
import torch

from tests.cache.store.locks import RecordedLock
from tests.cache.store.stores import write
from tests.small_model import make_experts
from vllm_dymoe.cache.store import FileStore, HostPlace, Manifest, StoreError, whole_host_cache
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.cache.transfer import HostCache
from vllm_dymoe.experts.format import all_keys
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.vllm_plugin import model_store
from vllm_dymoe.vllm_plugin.model_store import LayerSpec, cached_store, check_belongs, place_experts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXPERTS = make_experts()
PINNED = HostPlace(True, "auto: there is room", whole_host_cache(EXPERTS))
SPEC = LayerSpec("layers.1.mlp.experts", 6, 2, 64, 32, torch.bfloat16, False, 0, 1, 0, 1)


@pytest.fixture
def files(tmp_path):
    experts = make_experts()
    store = random_store(experts, StoreWriter(tmp_path / "store", Manifest(experts, "dummy", "a model")), seed=1)
    yield store
    store.close()


@pytest.fixture
def lock(monkeypatch):
    lock = RecordedLock()
    monkeypatch.setattr(model_store, "CudaPageLock", lambda device: lock)
    return lock


@pytest.mark.parametrize(("device", "pinned"), [(CPU, 0), (CUDA, 2)])
def test_memory_is_filled_and_locked_where_there_is_a_gpu(files, lock, device, pinned, capsys):
    with_files = FileStore(files.folder)
    store, place = place_experts(files, PINNED, device, asked_for=False)
    assert isinstance(store, HostCache)
    assert store.whole
    assert store.readable
    assert place == PINNED
    assert len(lock.pinned) == pinned
    for key in all_keys(store.experts):
        packed = torch.empty(store.experts.formats[key.bits].nbytes, dtype=torch.uint8)
        with_files.read_into(key, packed)
        assert torch.equal(store.packed(key), packed)
    with_files.close()
    assert "Reading experts into memory: 100%" in capsys.readouterr().err
    store.close()


def test_memory_that_cannot_be_locked_is_refused_where_it_was_asked_for(files, lock):
    assert place_experts(files, HostPlace(False), CUDA, asked_for=False) == (files, HostPlace(False))
    assert lock.calls == []
    lock._refuse = 1
    sentence = r"locking failed \(CUDA error 2: out of memory\).*; lower host_memory, or use host_store = \"file\"\."
    with pytest.raises(StoreError, match=sentence):
        place_experts(files, PINNED, CUDA, asked_for=True)
    assert not lock.pinned


def test_and_otherwise_it_is_held_behind_buffers_and_the_line_says_why(files, lock):
    lock._refuse = 0
    store, place = place_experts(files, PINNED, CUDA, asked_for=False)
    assert isinstance(store, HostCache)
    assert (store.whole, store.readable, store.slots.pinned) == (True, False, 0)
    assert "0 B of it pinned, the rest behind staging buffers: CUDA error 2: out of memory" in store.description
    assert place == PINNED
    store.close()


def test_memory_that_cannot_be_had_is_refused_where_it_was_asked_for_and_a_reason_elsewhere(files, monkeypatch):
    monkeypatch.setattr("vllm_dymoe.cache.transfer.host_slots.available_host_memory", lambda: 1000)
    for place in (PINNED, HostPlace(False, "", PINNED.host_cache)):
        with pytest.raises(
            StoreError, match=f"would be {PINNED.host_cache} bytes, but 1000 are free; lower host_memory"
        ):
            place_experts(files, place, CPU, asked_for=place.pinned)
    store, place = place_experts(files, PINNED, CPU, asked_for=False)
    assert (store, place.host_cache) == (files, 0)
    assert place.reason.endswith("but 1000 are free")


@pytest.mark.parametrize(
    ("experts", "spec", "sentence"),
    [
        (EXPERTS, dataclasses.replace(SPEC, ranks=2), r"tensor-parallel ranks \(0, 1\), the model needs \(0, 2\)"),
        (EXPERTS, dataclasses.replace(SPEC, rank=1, ranks=2), r"tensor-parallel ranks \(0, 1\), .* needs \(1, 2\)"),
        (make_experts(num_experts=8), SPEC, "experts per layer 6, the model needs 8"),
        (make_experts(dtype=torch.float16), SPEC, "expert formats"),
        (make_experts(group_size=64), SPEC, "expert formats"),
        (make_experts(bits=(8,)), SPEC, "expert formats"),
        (make_experts(hidden=128), SPEC, "expert formats"),
    ],
)
def test_a_store_for_another_model_is_refused(tmp_path, experts, spec, sentence):
    store = write(tmp_path / "store")
    check_belongs(store, EXPERTS, SPEC)
    with pytest.raises(StoreError, match=sentence) as caught:
        check_belongs(store, experts, spec)
    assert str(store.folder) in str(caught.value)
    assert "write the checkpoint again with `vllm-dymoe quantize`" in str(caught.value)


def test_a_damaged_or_another_models_store_of_an_earlier_start_is_written_again_with_a_warning(tmp_path, warnings):
    manifest = Manifest(EXPERTS, "rtn", "a model")
    write(tmp_path / "store").close()
    os.truncate(tmp_path / "store" / file_name(2), 5000)
    assert cached_store(tmp_path / "store", manifest) is None
    (warning,) = warnings()
    assert "the file was truncated" in warning
    assert "It is written again now." in warning
    write(tmp_path / "store").close()
    again = cached_store(tmp_path / "store", manifest)
    assert isinstance(again, FileStore)
    again.close()
    assert cached_store(tmp_path / "store", dataclasses.replace(manifest, quantizer="hqq")) is None
    assert "is another model's; it is replaced" in warnings()[1]
