"""Ways to read a store's files: the same bytes by all of them, and the choice between them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.cache.store.stores import read, write
from tests.small_model import fill, make_experts, make_store
from vllm_dymoe.cache.store import MANIFEST, FileStore, Manifest, StoreError
from vllm_dymoe.cache.store.disk import RATES, DiskRates, Reading, known_rates, open_direct, read_direct
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.header import read_header
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import SliceKey, all_keys
from vllm_dymoe.quantize import QUANTIZERS
from vllm_dymoe.quantize.packer import ExpertPacker

WAYS = [Reading(direct=True, depth=4), Reading(drops=True), Reading(check="always"), Reading(bytes_per_second=1e9)]


def as_version_5(folder, experts):
    """A store as it was written before slices were aligned."""
    packer = ExpertPacker(experts, QUANTIZERS["rtn"], StoreWriter(folder, Manifest(experts, "rtn", "m", alignment=1)))
    fill(packer)
    packer.finish().close()
    manifest = json.loads((folder / MANIFEST).read_text()) | {"version": 5}
    del manifest["alignment"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return FileStore(folder)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_all_ways_and_versions_have_the_same_bytes(tmp_path, old, nested):
    experts = make_experts(nested=nested)
    store = (as_version_5 if old else write)(tmp_path / "store", experts)
    memory = make_store(experts)
    for way in WAYS:
        store.reading = way
        for key in all_keys(experts):
            assert torch.equal(read(store, key), memory.packed(key))
    part = torch.full_like(memory.packed(SliceKey(1, 3, 4), range(1, 2)), 0xEE)
    store.reading = WAYS[0]
    store.read_into(SliceKey(1, 3, 4), part, range(1, 2))
    assert torch.equal(part, memory.packed(SliceKey(1, 3, 4), range(1, 2)))
    assert store.counts.reads == len(WAYS) * len(list(all_keys(experts))) + 1
    store.close()


def test_slices_of_new_stores_begin_on_blocks(tmp_path):
    store = write(tmp_path / "store", make_experts(bits=(8, 4), nested=True))
    assert {store._begin(key) % 4096 for key in all_keys(store.experts)} == {0}
    path = store.folder / file_name(1)
    with path.open("rb") as file:
        assert max(place.end for place in read_header(path, file.fileno()).values()) == path.stat().st_size
    store.close()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("nbytes", [1, 4096, 8192, 9000])
def test_reads_past_the_page_cache_begin_and_end_anywhere(tmp_path, offset, nbytes):
    path, there = tmp_path / "file", torch.randint(256, (13_000,), dtype=torch.uint8)
    path.write_bytes(there.numpy().tobytes())
    file = open_direct(path)
    if file is None:
        pytest.skip("this file system cannot read past the page cache")
    page = torch.zeros(20_480, dtype=torch.uint8)
    begin = -page.data_ptr() % 4096
    for destination in (torch.zeros(nbytes, dtype=torch.uint8), page[begin : begin + nbytes]):
        found = read_direct(file, destination, offset)
        assert found == min(nbytes, 13_000 - offset)
        assert torch.equal(destination[:found], there[offset : offset + found])
        assert not destination[found:].any()
    assert read_direct(file, torch.zeros(10, dtype=torch.uint8), 12_995) == 5, "the file ends"
    os.close(file)


def test_a_way_that_would_wait_says_so(store):
    store.reading = Reading(direct=True)
    if any(layer.direct is None for layer in store._layers):
        pytest.skip("this file system cannot read past the page cache")
    with pytest.raises(BlockingIOError):
        store.read_into(SliceKey(0, 0, 4), torch.empty(store.experts.formats[4].nbytes, dtype=torch.uint8), wait=False)


def test_an_emulated_disk_is_as_slow_as_it_is_told(store):
    nbytes, begun = store.experts.formats[4].nbytes, time.perf_counter()
    store.reading = Reading(bytes_per_second=nbytes / 0.01)
    for expert in range(4):
        read(store, SliceKey(0, expert, 4))
    assert time.perf_counter() - begun >= 0.04


def test_a_disk_is_measured_at_the_first_starts_the_best_is_kept_and_what_was_kept_is_checked(store, monkeypatch):
    found = store.rates()
    for measured, rate in ((2, 1e15), (3, 1.0)):  # idle, then busy
        direct = dict.fromkeys(found.direct, rate)
        monkeypatch.setattr("vllm_dymoe.cache.store.files.measure_rates", lambda *_: DiskRates(direct, rate, rate))  # noqa: B023
        assert store.rates() == DiskRates(dict.fromkeys(found.direct, 1e15), 1e15, 1e15, measured)
    assert found.cached > 0
    assert found.warm > 0
    assert bool(found.direct) == (all(layer.direct is not None for layer in store._layers))
    monkeypatch.setattr("vllm_dymoe.cache.store.files.measure_rates", lambda *_: pytest.fail("measured again"))
    assert store.rates() == known_rates(store.folder)
    for spoilt in ("{", "[]", '{"direct": {}, "cached": 0, "warm": 1}', '{"direct": {"x": 1}}'):
        (store.folder / RATES).write_text(spoilt)
        assert known_rates(store.folder) is None


@pytest.mark.parametrize(
    ("direct", "held", "past"),
    [({}, 0.0, False), ({1: 1.0, 8: 2.0}, 0.0, True), ({1: 1.0, 8: 2.0}, 0.9, False), ({1: 0.5}, 0.0, False)],
)
def test_the_page_cache_is_worth_what_it_holds(direct, held, past):
    rates = DiskRates(direct, cached=1.0, warm=10.0)
    assert rates.read_past_cache(held) is past
    assert replace(rates, direct={1: 1.0, 2: 1.95, 4: 2.0, 8: 2.05}).depth == 2


def test_a_store_that_goes_away_is_a_sentence_or_is_still_read(store):
    want = read(store, SliceKey(1, 3, 4))
    for path in store.folder.iterdir():
        path.unlink()
    assert torch.equal(read(store, SliceKey(1, 3, 4)), want)  # open files stay
    os.ftruncate(os.open(f"/proc/self/fd/{store._layers[0].file}", os.O_RDWR), 4096)
    for way in (Reading(), Reading(direct=True)):
        store.reading = way
        with pytest.raises(StoreError, match="the file was truncated"):
            read(store, SliceKey(0, 2, 4))


def test_a_process_that_is_killed_while_memory_fills_leaves_the_store_as_it_was(tmp_path):
    store = write(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    program = (
        "import sys; from pathlib import Path; from vllm_dymoe.cache.store import FileStore\n"
        "from vllm_dymoe.cache.store.disk import Reading\n"
        "from vllm_dymoe.cache.store import whole_host_cache\n"
        "from vllm_dymoe.cache.transfer import HostCache\n"
        "files = FileStore(Path(sys.argv[1])); files.reading = Reading(bytes_per_second=1e4)\n"
        "cache = HostCache(files, whole_host_cache(files.experts)); print('fills', flush=True); cache.fill()"
    )
    filling = subprocess.Popen([sys.executable, "-c", program, store.folder], stdout=subprocess.PIPE, text=True)
    assert filling.stdout.readline() == "fills\n"
    filling.send_signal(signal.SIGKILL)
    filling.wait()
    assert {path.name: path.read_bytes() for path in store.folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    read(store, SliceKey(1, 3, 4))
