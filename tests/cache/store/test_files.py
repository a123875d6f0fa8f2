"""Reading a store from its files: the bytes that were written, or a sentence."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from tests.cache.store.stores import read, write
from tests.small_model import make_experts
from vllm_dymoe.cache.store import MANIFEST, ErrorRecord, FileStore, Manifest, StoreError
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.experts.encoding import E8, E8_BASE, E8_NESTED
from vllm_dymoe.experts.format import SliceKey


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
    with pytest.raises(StoreError, match="the down projection of expert 1 at 4 bits"):
        read(store, key)
    store.close()


def test_the_shards_are_ordinary_safetensors_files(store, memory_store):
    for layer, index in enumerate(store.experts.layers):
        with safe_open(store.folder / file_name(index), "pt") as shard:
            assert sorted(shard.keys()) == ["2bit.packed experts", "2bit.xxh3", "4bit.packed experts", "4bit.xxh3"]
            assert torch.equal(
                shard.get_tensor("4bit.packed experts")[3][: store.experts.formats[4].nbytes],
                memory_store.packed(SliceKey(layer, 3, 4)),
            )


def test_a_pipeline_stage_opens_its_own_layers_only(store, memory_store):
    os.remove(store.folder / file_name(1))  # the other stage's
    stage = FileStore(store.folder, (2,))
    assert stage.experts.layers == (2,)
    for expert in range(stage.experts.num_experts):
        assert torch.equal(read(stage, SliceKey(0, expert, 4)), memory_store.packed(SliceKey(1, expert, 4)))
    stage.close()


def test_layers_that_a_store_does_not_have_are_named(store):
    with pytest.raises(StoreError, match=r"those of the layers \[1, 2\], but \[2, 3\] are needed"):
        FileStore(store.folder, (2, 3))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: os.truncate(path, 5000), r"00001\.safetensors has 5000 bytes where its header .* truncated"),
        (lambda path: path.unlink(), r"00001\.safetensors of the expert store cannot be opened \(No such file"),
        (lambda path: path.write_bytes(b"\xff" * 100_000), "is not a safetensors file"),
        (lambda path: (path.parent / MANIFEST).unlink(), "holds no expert store"),
        (lambda path: (path.parent / MANIFEST).write_text("{"), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text("[]"), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text('{"version": 5}'), "is not a manifest"),
        (lambda path: (path.parent / MANIFEST).write_text('{"version": 99}'), "has store version 99, but this .* 5"),
    ],
)
def test_damage_is_named_when_a_store_is_opened(store, spoil, sentence):
    spoil(store.folder / file_name(1))
    with pytest.raises(StoreError, match=sentence):
        FileStore(store.folder)


def manifests():
    """Of every kind of format."""
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
