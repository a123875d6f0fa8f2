"""A store that is being written is complete or absent, whatever the disk does."""

import errno
import itertools
import os
import shutil
import socket
import stat
from types import SimpleNamespace

import pytest
import torch

from tests.cache.store.stores import read, write
from tests.small_model import fill, make_experts, make_store
from vllm_dymoe import durable
from vllm_dymoe.cache.store import MANIFEST, Manifest, StoreError, files
from vllm_dymoe.cache.store.disk import RATES, DiskRates
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.durable import clean, is_temporary, keep_beside, replace_file
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def test_nothing_appears_under_its_name_before_it_is_complete(tmp_path):
    experts = make_experts()
    folder = tmp_path / "store"
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    packer.put(0, 0, Projection.GATE, torch.ones(32, 64))
    assert not folder.exists()
    with pytest.raises(StoreError, match=r"lacks 35 .* expert 0 in layer 1"):
        packer.finish()
    assert not folder.exists()


def test_two_writers_of_one_store_end_with_one_good_store(tmp_path):
    experts, folder = make_experts(), tmp_path / "store"
    packers = [
        ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "a model")))
        for _ in range(2)
    ]
    for packer in packers:
        fill(packer)
    stores = [packer.finish() for packer in packers]
    assert torch.equal(read(stores[0], SliceKey(0, 0, 4)), read(stores[1], SliceKey(0, 0, 4)))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_of_another_kind_and_a_truncated_one_are_replaced_and_not_used(tmp_path):
    write(tmp_path / "store", make_experts(bits=(8,))).close()
    write(tmp_path / "store").close()
    os.truncate(tmp_path / "store" / file_name(1), 5000)
    store = write(tmp_path / "store")
    assert store.experts.formats.keys() == {4, 2}
    assert torch.equal(read(store, SliceKey(1, 3, 4)), make_store(make_experts()).packed(SliceKey(1, 3, 4)))
    store.close()
    assert os.listdir(tmp_path) == ["store"]


def make_writer(folder, resume=lambda leftover: False):
    return StoreWriter(folder, Manifest(make_experts(), "rtn", "a model"), resume=resume)


def abandon(writer):
    """Stop as if the process had been killed; return the unfinished folder."""
    writer.close()
    return writer.partial


@pytest.mark.parametrize("pid", ["1", "999999999"])
def test_what_nobody_holds_is_removed_and_what_a_writer_holds_is_left_alone(tmp_path, monkeypatch, pid):
    monkeypatch.setattr(os, "getpid", lambda: int(pid))  # in containers all writers may have the same process id
    monkeypatch.setattr(socket, "gethostname", lambda: "all-the-same")
    living, dead = make_writer(tmp_path / "store").partial, abandon(make_writer(tmp_path / "store"))
    make_writer(tmp_path / "store")
    assert living.exists()
    assert not dead.exists()
    assert abandoned(tmp_path) == 0


def abandoned(folder):
    return len(clean(path for path in folder.iterdir() if is_temporary(path)))


def test_every_start_can_clean_and_the_living_go_on(tmp_path):
    living = make_writer(tmp_path / "one")
    dead = [abandon(make_writer(tmp_path / name)) for name in ("one", "two", "three")]
    assert set(clean(path for path in tmp_path.iterdir() if is_temporary(path))) == set(dead)
    assert os.listdir(tmp_path) == [living.partial.name]


@pytest.mark.parametrize("name", ["store.partial-0badb007-11223344", "store.partial-host-17-abcdefgh"])
def test_what_another_machine_may_be_writing_is_removed_only_when_it_is_old(tmp_path, name):
    other = tmp_path / name
    other.mkdir()
    (other / "shard").write_bytes(b"")
    make_writer(tmp_path / "store")
    assert other.exists()
    for path in (other / "shard", other):
        os.utime(path, (0, 0))
    make_writer(tmp_path / "store")
    assert not other.exists()


def test_a_leftover_that_is_gone_on_with_is_the_users_own_and_is_held(tmp_path, monkeypatch):
    left = abandon(make_writer(tmp_path / "store"))
    writer = make_writer(tmp_path / "store", resume=lambda leftover: True)
    assert writer.partial == left
    assert make_writer(tmp_path / "store", resume=lambda leftover: True).partial != left
    abandon(writer)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert make_writer(tmp_path / "store", resume=lambda leftover: pytest.fail("another user's")).partial != left


def pack_layer(writer, layer):
    for expert, (bits, fmt), one in itertools.product(range(6), make_experts().formats.items(), Projection):
        section = torch.ones(fmt.matrices[one].nbytes, dtype=torch.uint8)
        writer.write(SliceKey(layer, expert, bits), one, section)
    writer.sync(layer)


def test_a_continued_store_needs_room_only_for_the_rest(tmp_path, monkeypatch):
    writer = make_writer(tmp_path / "store")
    pack_layer(writer, 0)
    left = abandon(writer)
    written = sum(path.stat().st_blocks for path in left.iterdir()) * 512
    needed = sum(path.stat().st_size for path in left.iterdir())
    assert 3 * 4096 < written < needed

    def begin(free, *, continues):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return make_writer(tmp_path / "store", resume=lambda leftover: continues)

    assert abandon(begin(needed - written, continues=True)) == left
    with pytest.raises(StoreError, match=r"the rest of .*store needs .* \(1 B too little\)") as refused:
        begin(needed - written - 1, continues=True)
    assert f"What is packed stays in {left}" in str(refused.value)
    assert os.listdir(tmp_path) == [left.name]
    with pytest.raises(StoreError, match=r"store needs .* \(1 B too little\)") as refused:
        begin(needed - 1, continues=False)
    assert "stays" not in str(refused.value)
    assert not os.listdir(tmp_path)
    begin(needed, continues=False)


def test_a_refusal_names_what_another_machine_may_be_writing(tmp_path, monkeypatch):
    """After a reboot this machine's own leftovers count as such."""
    other = tmp_path / "store.partial-0badb007-11223344"
    other.mkdir()
    (other / "shard").write_bytes(b"x" * 8192)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=f"{other} takes .* KiB; remove it if nothing is writing it"):
        make_writer(tmp_path / "store")
    assert os.listdir(tmp_path) == [other.name]


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_disk_that_fails_when_a_store_is_continued_leaves_what_is_packed(tmp_path, monkeypatch, call):
    writer = make_writer(tmp_path / "store")
    pack_layer(writer, 0)
    left = abandon(writer)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, call, fail)
        with pytest.raises(StoreError, match=f"No space left.*stays in {left}"):
            make_writer(tmp_path / "store", resume=lambda leftover: True)
    assert abandon(make_writer(tmp_path / "store", resume=lambda leftover: True)) == left


def test_only_synced_layers_are_left_to_another_writer(tmp_path):
    for layers in (0, 1):
        writer = make_writer(tmp_path / "store")
        for layer in range(layers):
            pack_layer(writer, layer)
        writer.leave()
        assert len(os.listdir(tmp_path)) == layers
        assert bool(writer.kept) == bool(layers)


def test_a_link_in_the_place_of_a_leftover_leads_absent(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(b"mine")
    (tmp_path / f"store.partial-{durable._boot()}-00000000").symlink_to(other)
    make_writer(tmp_path / "store", resume=lambda leftover: True).discard()
    assert (other / "file").read_bytes() == b"mine"
    assert os.listdir(other) == ["file"]


def test_links_in_a_leftover_are_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    left = abandon(make_writer(tmp_path / "store"))
    (left / file_name(1)).unlink()
    (left / file_name(1)).symlink_to(victim)
    with pytest.raises(StoreError):
        make_writer(tmp_path / "store", resume=lambda leftover: True)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_do_not_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        writer = make_writer(tmp_path / "a" / "b" / "store")
        assert stat.S_IMODE(writer.partial.stat().st_mode) == 0o700
        for layer, expert, one in itertools.product(range(2), range(6), Projection):
            for bits, fmt in make_experts().formats.items():
                writer.write(
                    SliceKey(layer, expert, bits), one, torch.zeros(fmt.matrices[one].nbytes, dtype=torch.uint8)
                )
        store = writer.finish()
        store.rates()
        store.close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.folder.iterdir()}
    assert set(modes.values()) == {0o644}
    assert RATES in modes
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o755
    for folder in (store.folder.parent, store.folder.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755 & ~umask


@pytest.mark.parametrize("name", [RATES, MANIFEST])
def test_what_is_kept_beside_a_store_is_not_written_through_links(tmp_path, name):
    """Others may have created links under the file's name or under temporary names."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    folder = tmp_path / "store"
    folder.mkdir()
    for planted in (name, f"{name}.{os.getpid()}", f"{name}.{os.getpid() + 1}"):
        (folder / planted).symlink_to(victim)
    replace_file(folder / name, b"{}")
    keep_beside(folder / name, "a disk", DiskRates({}, 1.0, 1.0))
    assert victim.read_bytes() == b"mine"
    assert not (folder / name).is_symlink()


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_good_store_that_cannot_be_opened_now_is_not_replaced(tmp_path, monkeypatch, error):
    write(tmp_path / "store").close()
    before = {path.name: path.stat().st_ino for path in (tmp_path / "store").iterdir()}

    def fail(path):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(files, "open_regular", fail)
    with pytest.raises(StoreError):
        write(tmp_path / "store")
    assert {path.name: path.stat().st_ino for path in (tmp_path / "store").iterdir()} == before
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize(("call", "number"), [("pwrite", 0), ("pwrite", 7), ("pwrite", 40), ("fsync", 0)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_it_is_written_to_leaves_nothing(tmp_path, monkeypatch, call, number, code):
    real, calls = getattr(os, call), itertools.count()

    def fail(*arguments):
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError) as caught:
        write(tmp_path / "store")
    assert str(tmp_path / "store") in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert "set store_dir to" in str(caught.value)
    assert not os.listdir(tmp_path)
