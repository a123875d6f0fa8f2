"""Reading a store returns the bytes that were written, or raises a clear error."""

import contextlib
import errno
import itertools
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.cache.store.stores import as_older, damage, read, write
from tests.small_model import make_experts
from vllm_dymoe.cache.store import MANIFEST, DamagedStoreError, ErrorRecord, FileStore, Manifest, StoreError
from vllm_dymoe.cache.store.files import checksum, file_name
from vllm_dymoe.cache.store.header import read_header
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.encoding import E8, E8_BASE, E8_NESTED
from vllm_dymoe.experts.format import Projection, SliceKey, all_keys
from vllm_dymoe.quantize.dummy import fill_randomly, random_store


@pytest.mark.parametrize("projections", [range(1), range(1, 2), range(1, 3), range(2, 3)])
def test_projections_are_read_one_by_one_or_together(store, memory_store, projections):
    for key in (SliceKey(0, 0, 4), SliceKey(1, 3, 2)):
        fmt = store.experts.formats[key.bits]
        want = memory_store.packed(key)[fmt.sections[projections[0]].start : fmt.sections[projections[-1]].stop]
        for source in (store, memory_store):
            got = torch.full_like(want, 0xEE)
            source.read_into(key, got, projections)
            assert torch.equal(got, want)


def test_a_projection_that_was_not_read_is_not_taken_for_checked(tmp_path):
    store = write(tmp_path / "store")
    key, fmt = SliceKey(1, 1, 4), store.experts.formats[4]
    with (store.folder / file_name(2)).open("r+b") as file:
        file.seek(store._begin(key) + fmt.sections[2].start)
        file.write(b"\xff\xff\xff")
    store.read_into(key, torch.empty(fmt.sections[1].stop, dtype=torch.uint8), range(2))
    with pytest.raises(StoreError, match="down projection of expert 1"):
        read(store, key)
    store.close()


def test_the_shards_are_ordinary_safetensors_files(store, memory_store):
    for layer, index in enumerate(store.experts.layers):
        with safe_open(store.folder / file_name(index), "pt") as shard:
            assert sorted(shard.keys()) == ["2bit.blobs", "2bit.xxh3", "4bit.blobs", "4bit.xxh3"]
            assert torch.equal(
                shard.get_tensor("4bit.blobs")[3][: store.experts.formats[4].nbytes],
                memory_store.packed(SliceKey(layer, 3, 4)),
            )


def test_a_pipeline_stage_opens_its_own_layers_only(store, memory_store):
    os.remove(store.folder / file_name(1))  # the shard of the other pipeline stage
    stage = FileStore(store.folder, (2,))
    assert stage.experts.layers == (2,)
    for expert in range(stage.experts.num_experts):
        assert torch.equal(read(stage, SliceKey(0, expert, 4)), memory_store.packed(SliceKey(1, expert, 4)))
    stage.close()


def test_layers_that_a_store_does_not_have_are_named(store):
    with pytest.raises(StoreError, match=r"\[1, 2\], but \[2, 3\]"):
        FileStore(store.folder, (2, 3))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: os.truncate(path, 5000), r"00001\.safetensors has 5000 bytes"),
        (lambda path: path.unlink(), r"00001\.safetensors .* missing"),
        (lambda path: path.write_bytes(b"\xff" * 100_000), "is not a safetensors file"),
        (lambda path: (path.parent / MANIFEST).unlink(), "holds no expert store"),
        (lambda path: (path.parent / MANIFEST).write_text("{"), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text("[]"), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text('{"version": 5}'), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text('{"version": 99}'), "store version 99"),
    ],
)
def test_damage_is_named_when_a_store_is_opened(store, spoil, sentence):
    spoil(store.folder / file_name(1))
    with pytest.raises(StoreError, match=sentence):
        FileStore(store.folder)


def manifests():
    """Yield experts of every kind of format."""
    plain = make_experts()
    for changes in ({}, {"integer_zeros": True}, {"act_order": True}):
        yield replace(plain, formats={**plain.formats, 4: replace(plain.formats[4], **changes)})
    yield make_experts(bias=True)
    for bits in ((4, 2), (8, 4)):
        yield make_experts(bits=bits, nested=True)
    for codes in ({4: E8_NESTED, 2: E8_BASE}, {2: E8}):
        yield replace(plain, formats={bits: replace(plain.formats[4], encoding=code) for bits, code in codes.items()})


def test_what_experts_lose_is_said_and_may_be_absent(store, tmp_path):
    lost = {2: ((0.5, 0.25), (1e-9, 3.0))}
    manifest = replace(store.manifest, errors=ErrorRecord({2: (0.5, 0.5)}, experts=lost))
    said = manifest.to_json()
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    assert Manifest.read(tmp_path).errors.experts == lost
    del said["errors"]["experts"]
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    old = Manifest.read(tmp_path)
    assert (old, old.errors.experts) == (manifest, {})


def test_a_manifest_says_what_its_formats_are(store, tmp_path):
    assert store.manifest == Manifest(store.experts, "rtn", "a model")
    found = [Manifest(experts, "rtn", "a model") for experts in manifests()]
    for number, manifest in enumerate(found):
        (tmp_path / MANIFEST).write_text(json.dumps(manifest.to_json()))
        assert [Manifest.read(tmp_path) == other for other in found] == [other is found[number] for other in found]


def make_writer(folder, experts, model="a model"):
    return StoreWriter(folder, Manifest(experts, "rtn", model))


def seeded(folder, experts, seed, model="a model"):
    store = random_store(experts, make_writer(folder, experts, model), seed)
    store.close()
    return store.folder


def exchanged(tmp_path):
    """Swap two layers of one store."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    first, second = (folder / file_name(layer) for layer in (1, 2))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    return folder


def copied(tmp_path):
    """Replace a layer by a copy of another one."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    shutil.copy(folder / file_name(1), folder / file_name(2))
    return folder


def foreign(tmp_path):
    """Take the shard of the same layer from another model."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    shutil.copy(seeded(tmp_path / "other", make_experts(), 2, "b model") / file_name(2), folder)
    return folder


def same_bytes_of_another_model(tmp_path):
    """Take a shard with the same experts from a different model."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    shutil.copy(seeded(tmp_path / "other", make_experts(), 1, "b model") / file_name(2), folder)
    return folder


def other_manifest(tmp_path):
    """Take the manifest of a store with the same shape."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    shutil.copy(seeded(tmp_path / "other", make_experts(), 2) / MANIFEST, folder)
    return folder


def other_meaning(tmp_path):
    """Change the manifest so that it describes the same bytes differently."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    said = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(said | {"zeros_in_steps": [4]}))
    return folder


def other_checksums(tmp_path):
    """Change an expert together with its checksum."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    store = FileStore(folder)
    key, fmt = SliceKey(1, 1, 4), store.experts.formats[4]
    section = torch.randint(256, (fmt.matrices[0].nbytes,), dtype=torch.uint8).numpy()
    path = folder / file_name(2)
    with path.open("rb") as file:
        table = read_header(path, file.fileno())["4bit.xxh3"].begin
    damage(path, store._begin(key), section.tobytes())
    damage(path, table + key.expert * 3 * 8, checksum(section.data).to_bytes(8, "little", signed=True))
    store.close()
    return folder


def undescribed(tmp_path):
    """Write a manifest of the current version without digests."""
    folder = seeded(tmp_path / "store", make_experts(), 1)
    said = json.loads((folder / MANIFEST).read_text())
    del said["shards"]["2"]
    (folder / MANIFEST).write_text(json.dumps(said))
    return folder


MIXED = [
    exchanged, copied, foreign, same_bytes_of_another_model, other_manifest, other_meaning, other_checksums,
    undescribed,
]  # fmt: skip


@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.__name__)
def test_shards_that_are_not_this_stores_are_refused_when_it_is_opened(tmp_path, mixed):
    folder = mixed(tmp_path)
    with pytest.raises(DamagedStoreError) as caught:
        FileStore(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("version", [5, 6])
def test_an_older_store_is_read_says_that_nothing_binds_its_shards_and_can_be_bound(tmp_path, version, memory_store):
    store = as_older(tmp_path / "store", make_experts(), version)
    assert not store.manifest.shards
    assert torch.equal(read(store, SliceKey(1, 3, 4)), memory_store.packed(SliceKey(1, 3, 4)))
    store.bind()
    store.close()
    with contextlib.closing(FileStore(store.folder)) as bound:
        assert bound.manifest == store.manifest
        assert bound.manifest.shards.keys() == {1, 2}
        assert torch.equal(read(bound, SliceKey(1, 3, 4)), memory_store.packed(SliceKey(1, 3, 4)))
    damage(store.folder / file_name(1), 100, b" ")
    (store.folder / file_name(1)).rename(store.folder / file_name(2))
    with pytest.raises(DamagedStoreError):
        FileStore(store.folder, (2,))


ORDERS = {
    "outside": lambda order: order.fill_(len(order)),
    "negative": lambda order: order.fill_(-1),
    "twice": lambda order: order[1:2].copy_(order[:1]),
}


@pytest.mark.parametrize("wrong", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("projection", Projection)
def test_an_order_of_columns_that_is_no_permutation_is_refused(tmp_path, wrong, projection):
    plain = make_experts(bits=(4,))
    experts = replace(plain, formats={4: replace(plain.formats[4], act_order=True)})
    writer = make_writer(tmp_path / "store", experts)
    fmt, generator = experts.formats[4], torch.Generator().manual_seed(1)
    for layer, expert, one in itertools.product(range(2), range(6), Projection):
        section = torch.empty(fmt.matrices[one].nbytes, dtype=torch.uint8)
        fill_randomly(fmt.matrices[one], section, generator)
        if (layer, expert, one) == (1, 4, projection):
            wrong(fmt.matrices[one].view(section).order)
        writer.write(SliceKey(layer, expert, 4), one, section)
    store = writer.finish()
    for key in all_keys(experts):
        if key == SliceKey(1, 4, 4):
            with pytest.raises(DamagedStoreError, match=f"{projection.name.lower()} projection of expert 4"):
                read(store, key)
            assert not store.in_memory(key)
        else:
            read(store, key)
    store.close()


ERRORS = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES]


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "pread", "fstat"])
def test_a_file_that_cannot_be_opened_is_no_proof_of_damage(store, monkeypatch, call, code):
    real = getattr(os, call)

    def fail(place, *arguments, **more):
        ours = str(store.folder) in (str(place) if call == "open" else os.readlink(f"/proc/self/fd/{place}"))
        if ours:
            raise OSError(code, os.strerror(code))
        return real(place, *arguments, **more)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError) as caught:
        FileStore(store.folder)
    assert not isinstance(caught.value, DamagedStoreError)
    assert os.strerror(code) in str(caught.value)
    assert "write the store again" not in str(caught.value)
