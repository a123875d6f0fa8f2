"""The host store: what is written is read, and whatever is not right is found and named."""

import collections
import errno
import gc
import itertools
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.small_model import fill, make_experts, make_store
from tests.store.locks import RecordedLock
from vllm_dymoe.experts.layout import BlobKey, Projection, all_keys
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.dummy import random_store
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.store import MANIFEST, FileStore, Manifest, MemoryStore, StoreError, memory_bytes, page_lock
from vllm_dymoe.store.files import file_name
from vllm_dymoe.store.header import read_header
from vllm_dymoe.store.writer import StoreWriter


def write(folder, experts=None):
    experts = experts or make_experts()
    packer = ExpertPacker(experts, make_quantizer("rtn"), StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    try:
        fill(packer)
        return packer.finish()
    except StoreError:
        packer.discard()
        raise


@pytest.fixture
def store(tmp_path):
    store = write(tmp_path / "store")
    yield store
    store.close()


def read(store, key):
    blob = torch.full((store.experts.formats[key.bits].nbytes,), 0xEE, dtype=torch.uint8)
    store.read_into(key, blob)
    return blob


def test_files_and_memory_hold_the_same_bytes(store, memory_store):
    for key in all_keys(store.experts):
        assert torch.equal(read(store, key), memory_store.blob(key))


@pytest.mark.parametrize("projections", [range(1), range(1, 2), range(1, 3), range(2, 3)])
def test_projections_are_read_one_by_one_or_together(store, memory_store, projections):
    for key in (BlobKey(0, 0, 4), BlobKey(1, 3, 2)):
        fmt = store.experts.formats[key.bits]
        want = memory_store.blob(key)[fmt.sections[projections[0]].start : fmt.sections[projections[-1]].stop]
        for source in (store, memory_store):
            got = torch.full_like(want, 0xEE)
            source.read_into(key, got, projections)
            assert torch.equal(got, want)


def test_a_projection_that_was_not_read_is_not_taken_for_checked(tmp_path):
    store = write(tmp_path / "store")
    key, fmt = BlobKey(1, 1, 4), store.experts.formats[4]
    extent = store._extents[1][4]
    with (store.folder / file_name(2)).open("r+b") as file:
        file.seek(extent.offset + fmt.nbytes + fmt.sections[2].start)
        file.write(b"\xff\xff\xff")
    store.read_into(key, torch.empty(fmt.sections[1].stop, dtype=torch.uint8), range(2))
    with pytest.raises(StoreError, match="the down projection of expert 1 at 4 bits"):
        read(store, key)
    store.close()


def test_a_whole_file_store_goes_into_memory(store, memory_store):
    copy = MemoryStore.from_files(store)
    assert all(torch.equal(copy.blob(key), memory_store.blob(key)) for key in all_keys(store.experts))


def test_the_shards_are_ordinary_safetensors_files(store, memory_store):
    for layer, index in enumerate(store.experts.layers):
        with safe_open(store.folder / file_name(index), "pt") as shard:
            assert sorted(shard.keys()) == ["2bit.blobs", "2bit.xxh3", "4bit.blobs", "4bit.xxh3"]
            assert torch.equal(shard.get_tensor("4bit.blobs")[3], memory_store.blob(BlobKey(layer, 3, 4)))


def test_data_begin_on_a_page_and_every_blob_is_aligned(store):
    path = store.folder / file_name(1)
    with path.open("rb") as file:
        header, start = read_header(path, file.fileno())
    assert start % 4096 == 0
    for bits, fmt in store.experts.formats.items():
        assert (start + header[f"{bits}bit.blobs"]["data_offsets"][0]) % 256 == 0
        assert fmt.nbytes % 256 == 0


def test_the_manifest_survives_the_round_trip(store):
    assert Manifest.read(store.folder) == store.manifest == Manifest(store.experts, "rtn", "a model")


def test_nothing_appears_under_its_name_before_it_is_complete(tmp_path):
    experts = make_experts()
    folder = tmp_path / "store"
    packer = ExpertPacker(experts, make_quantizer("rtn"), StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    packer.put(0, 0, Projection.GATE, torch.ones(32, 64))
    assert not folder.exists()
    with pytest.raises(StoreError, match=r"lacks 35 expert projections.*up projection of expert 0 in layer 1"):
        packer.finish()
    assert not folder.exists()


def test_two_writers_of_one_store_end_with_one_good_store(tmp_path):
    experts, folder = make_experts(), tmp_path / "store"
    packers = [
        ExpertPacker(experts, make_quantizer("rtn"), StoreWriter(folder, Manifest(experts, "rtn", "a model")))
        for _ in range(2)
    ]
    for packer in packers:
        fill(packer)
    stores = [packer.finish() for packer in packers]
    assert torch.equal(read(stores[0], BlobKey(0, 0, 4)), read(stores[1], BlobKey(0, 0, 4)))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_of_another_kind_in_the_place_is_replaced_and_not_used(tmp_path):
    write(tmp_path / "store", make_experts(bits=(8,))).close()
    store = write(tmp_path / "store")
    assert store.experts.formats.keys() == {4, 2}
    assert torch.equal(read(store, BlobKey(1, 3, 4)), make_store(make_experts()).blob(BlobKey(1, 3, 4)))
    store.close()
    assert os.listdir(tmp_path) == ["store"]


def test_a_truncated_store_in_the_place_is_replaced(tmp_path):
    write(tmp_path / "store").close()
    os.truncate(tmp_path / "store" / file_name(1), 5000)
    write(tmp_path / "store").close()
    FileStore(tmp_path / "store").close()
    assert os.listdir(tmp_path) == ["store"]


def test_what_a_dead_writer_left_is_removed_and_a_living_one_is_left_alone(tmp_path):
    experts = make_experts()
    living = StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    partial = living.partial
    dead = partial.with_name(partial.name.replace(f"-{os.getpid()}-", "-999999999-"))
    dead.mkdir()
    StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    assert partial.exists()
    assert not dead.exists()


def damage(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(data)


def test_a_flipped_bit_is_found_at_the_first_read(store):
    shard = store.folder / file_name(2)
    fmt = store.experts.formats[4]
    damage(shard, 4096 + fmt.nbytes + fmt.sections[1].start, b"\xff\xfe")
    fresh = FileStore(store.folder)
    read(fresh, BlobKey(1, 0, 4))
    with pytest.raises(StoreError, match=r"00002.*corrupted: the up projection of expert 1 at 4 bits"):
        read(fresh, BlobKey(1, 1, 4))
    read(FileStore(store.folder, verify=False), BlobKey(1, 1, 4))


def test_a_truncated_shard_is_refused_at_opening(store):
    os.truncate(store.folder / file_name(2), 5000)
    with pytest.raises(StoreError, match=r"00002\.safetensors has 5000 bytes where its header promises .* truncated"):
        FileStore(store.folder)


def test_a_shard_that_shrinks_while_it_is_open_is_an_error_and_no_crash(store):
    os.truncate(store.folder / file_name(1), 4096 + 10)
    with pytest.raises(StoreError, match=r"00001\.safetensors ends at byte 4106, inside expert 0"):
        read(store, BlobKey(0, 0, 4))


def test_a_missing_shard_is_named(store):
    (store.folder / file_name(1)).unlink()
    with pytest.raises(StoreError, match=r"00001\.safetensors of the expert store cannot be opened \(No such file"):
        FileStore(store.folder)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "holds no expert store"),
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        (json.dumps({"version": 99}), "has store version 99, but this vllm-dymoe reads version 4"),
        (json.dumps({"version": 4}), "is not a manifest"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(StoreError, match=sentence):
        FileStore(tmp_path)


def test_a_file_that_is_no_safetensors_file_is_named(store):
    (store.folder / file_name(1)).write_bytes(b"\xff" * 100_000)
    with pytest.raises(StoreError, match="is not a safetensors file"):
        FileStore(store.folder)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    experts = make_experts()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(
        StoreError, match=r"needs [\d.]+ KiB, but its disk has 10 B left \([\d.]+ KiB too little\); free"
    ):
        StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.ones(64, 64), r"gate projection of expert 5 in layer 2 has shape \[64, 64\] .* says \[32, 64\]"),
        (torch.full((32, 64), float("nan")), "gate projection of expert 5 in layer 2 cannot be quantized to 4 bits"),
    ],
)
def test_wrong_weights_are_named(tmp_path, weight, sentence):
    experts = make_experts()
    packer = ExpertPacker(experts, make_quantizer("rtn"), StoreWriter(tmp_path / "s", Manifest(experts, "rtn", "")))
    with pytest.raises(StoreError, match=sentence):
        packer.put(1, 5, Projection.GATE, weight)


@pytest.mark.parametrize("number", [0, 7, 40])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_it_is_written_to_leaves_nothing(tmp_path, monkeypatch, number, code):
    real, calls = os.pwrite, itertools.count()

    def pwrite(*arguments):
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError) as caught:
        write(tmp_path / "store")
    assert str(tmp_path / "store") in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert "set store_dir to" in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_disk_that_fails_at_the_last_sync_leaves_nothing(tmp_path, monkeypatch):
    def fsync(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match=r"cannot be written: Input/output error; .* set store_dir to"):
        write(tmp_path / "store")
    assert not os.listdir(tmp_path)


def test_a_real_disk_that_is_full(tmp_path):
    """On a file system of 64 KiB: refused before writing, and where the space goes meanwhile, at the write."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=False).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(StoreError, match=r"needs [\d.]+ KiB, but its disk has [\d.]+ KiB left"):
            write(tmp_path / "store")
        usage = collections.namedtuple("usage", "free")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda path: usage(2**40))
            with pytest.raises(StoreError, match="No space left on device; free some space or set store_dir"):
                write(tmp_path / "store")
        assert not os.listdir(tmp_path)
        subprocess.run(["mount", "-o", "remount,ro,size=1m", tmp_path], check=True)
        with pytest.raises(StoreError, match="Read-only file system; free some space or set store_dir"):
            write(tmp_path / "store")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    def mkdtemp(**settings):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    with pytest.raises(StoreError, match="Read-only file system; free some space or set store_dir"):
        write(tmp_path / "store")


def test_experts_that_are_missing_are_named(tmp_path):
    experts = make_experts()
    sink = StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    packer = ExpertPacker(experts, make_quantizer("rtn"), sink)
    put = packer.put
    packer.put = lambda *what: None if what[:3] == (1, 4, Projection.UP) else put(*what)
    fill(packer)
    with pytest.raises(StoreError, match=r"lacks 1 expert .* up projection of expert 4 in layer 2; download it again"):
        packer.finish()
    packer.discard()
    assert not os.listdir(tmp_path)


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


def test_a_killed_writer_leaves_no_store_and_the_next_one_cleans_up(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from tests.store import test_store as t;"
        "from vllm_dymoe.store import writer;"
        "writer.write_manifest = lambda *a: os.kill(os.getpid(), signal.SIGKILL); t.write(Path(sys.argv[1]))"
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "store"], check=False)
    assert killed.returncode == -9
    (partial,) = tmp_path.iterdir()
    with pytest.raises(StoreError, match="holds no expert store"):
        FileStore(partial)
    write(tmp_path / "store").close()
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("changes", [{"integer_zeros": True}, {"act_order": True}, {"bias": True}])
def test_a_manifest_says_what_its_formats_are(tmp_path, changes):
    experts = make_experts()
    experts = replace(experts, formats={**experts.formats, 4: replace(experts.formats[4], **changes)})
    if "bias" in changes:  # of all formats
        experts = make_experts(bias=True)
    manifest = Manifest(experts, "rtn", "a model")
    (tmp_path / MANIFEST).write_text(json.dumps(manifest.to_json()))
    assert Manifest.read(tmp_path) == manifest
    assert manifest != Manifest(make_experts(), "rtn", "a model")


def test_a_pipeline_stage_opens_its_own_layers_only(store, memory_store):
    os.remove(store.folder / file_name(1))  # the other stage's: nobody asks for it
    stage = FileStore(store.folder, (2,))
    assert stage.experts.layers == (2,)
    for expert in range(stage.experts.num_experts):
        assert torch.equal(read(stage, BlobKey(0, expert, 4)), memory_store.blob(BlobKey(1, expert, 4)))
    stage.close()


def test_layers_that_a_store_does_not_have_are_named(store):
    with pytest.raises(StoreError, match=r"those of the layers \[1, 2\], but \[2, 3\] are needed"):
        FileStore(store.folder, (2, 3))
