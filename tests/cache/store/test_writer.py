"""Writing a store: it is complete or not there, whatever the disk does."""

import errno
import itertools
import os

import pytest
import torch

from tests.cache.store.stores import read, write
from tests.small_model import fill, make_experts, make_store
from vllm_dymoe.cache.store import Manifest, StoreError
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import Projection, SliceKey
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker


def test_nothing_appears_under_its_name_before_it_is_complete(tmp_path):
    experts = make_experts()
    folder = tmp_path / "store"
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "a model")))
    packer.put(0, 0, Projection.GATE, torch.ones(32, 64))
    assert not folder.exists()
    with pytest.raises(StoreError, match=r"lacks 35 expert projections.*up projection of expert 0 in layer 1"):
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


def test_what_a_dead_writer_left_is_removed_and_a_living_one_is_left_alone(tmp_path):
    experts = make_experts()
    living = StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    partial = living.partial
    dead = partial.with_name(partial.name.replace(f"-{os.getpid()}-", "-999999999-"))
    dead.mkdir()
    StoreWriter(tmp_path / "store", Manifest(experts, "rtn", "a model"))
    assert partial.exists()
    assert not dead.exists()


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
