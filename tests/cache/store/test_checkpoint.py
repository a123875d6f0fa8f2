"""Experts in a checkpoint's own files have the bytes of a packed copy."""

import os

import pytest
import torch
from safetensors.torch import save_file

from tests.small_model import make_experts, random_weight
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import CheckpointStore, DamagedStoreError, Manifest, StoreError, whole_host_cache
from vllm_dymoe.cache.store.disk import Reading
from vllm_dymoe.cache.store.header import read_header
from vllm_dymoe.experts.format import Projection, SliceKey, all_keys

EXPERTS = make_experts(layers=2, num_experts=3, bits=(16,))


@pytest.fixture
def folder(tmp_path):
    """Write two files, so that the matrices of each expert are in both.

    Their order differs from that in a packed expert.
    """
    tensors = [{}, {}]
    for layer in range(2):
        for expert in range(3):
            for projection in reversed(Projection):
                name = f"{layer}.{expert}.{projection.name}"
                weight = random_weight(EXPERTS, layer, expert, projection).to(EXPERTS.formats[16].dtype)
                tensors[projection is Projection.UP][name] = weight.contiguous()
    for number, some in enumerate(tensors):
        save_file(some, tmp_path / f"model-{number}.safetensors")
    return tmp_path


def opened(folder):
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            for name, place in read_header(path, file.fileno()).items():
                layer, expert, projection = name.split(".")
                places[int(layer), int(expert), Projection[projection]] = place
    return CheckpointStore(folder, Manifest(EXPERTS, "none", "a model"), places)


@pytest.fixture
def store(folder):
    store = opened(folder)
    yield store
    store.close()


def read(store, key, projections=range(3)):
    fmt = EXPERTS.formats[16]
    span = fmt.span(projections)
    packed = torch.full((span.stop - span.start,), 0xEE, dtype=torch.uint8)
    store.read_into(key, packed, projections)
    return packed


@pytest.mark.parametrize("direct", [False, True])
def test_an_expert_has_the_bytes_of_its_tensors(store, direct):
    store.reading = Reading(direct=direct, depth=2)
    for key in all_keys(EXPERTS):
        expert = EXPERTS.formats[16].view(read(store, key))
        for projection in Projection:
            want = random_weight(EXPERTS, key.layer, key.expert, projection).to(expert.up.weight.dtype)
            assert torch.equal(expert[projection].weight, want)


def test_a_part_is_that_part(store):
    whole, key = read(store, SliceKey(1, 2, 16)), SliceKey(1, 2, 16)
    span = EXPERTS.formats[16].span(range(1, 3))
    assert torch.equal(read(store, key, range(1, 3)), whole[span])


def test_host_memory_is_filled_from_it(folder):
    cache = HostCache(opened(folder), whole_host_cache(EXPERTS))
    cache.fill()
    direct = opened(folder)
    for key in all_keys(EXPERTS):
        assert torch.equal(cache.packed(key), read(direct, key))
    direct.close()
    cache.close()


def test_a_cpu_cannot_compute_from_it_in_place(store):
    assert not store.mapped
    assert not store.in_memory(SliceKey(0, 0, 16))


def test_rates_are_measured(store):
    assert store.rates().warm > 0


def test_a_file_that_changes_is_an_error(store, folder):
    read(store, SliceKey(0, 0, 16))
    os.utime(folder / "model-1.safetensors", (1, 1))
    with pytest.raises(DamagedStoreError, match=r"model-1\.safetensors"):
        read(store, SliceKey(0, 0, 16))


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_gets_another_mode_or_name_or_is_removed_is_read_on(store, folder, direct):
    store.reading = Reading(direct=direct, depth=2)
    path, key = folder / "model-1.safetensors", SliceKey(0, 0, 16)
    before = read(store, key)
    for change in (
        lambda: path.chmod(0o600),
        lambda: (folder / "link").hardlink_to(path),
        lambda: path.rename(folder / "other"),
        lambda: (folder / "other").unlink(),
        lambda: (folder / "link").unlink(),
    ):
        change()
        assert torch.equal(read(store, key), before)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_with_other_weights_is_an_error_also_if_its_size_and_time_are_the_same(store, folder, direct):
    store.reading = Reading(direct=direct, depth=2)
    path, key = folder / "model-1.safetensors", SliceKey(0, 0, 16)
    read(store, key)
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-len(content) // 2 :] = bytes(len(content) // 2)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with pytest.raises(DamagedStoreError, match=r"model-1\.safetensors has changed"):
        read(store, key)


def test_a_missing_file_is_an_error(folder):
    opened(folder).close()
    places = opened(folder)
    places.close()
    (folder / "model-0.safetensors").rename(folder / "other")
    with pytest.raises(StoreError, match="model-0"):
        CheckpointStore(folder, places.manifest, places._places)
