"""All ways to read a store's files return the same bytes; the fastest is chosen."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cache.store.stores import as_older, read, write
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.store import MANIFEST, DamagedStoreError, FileStore, StoreError, files
from vllm_dymoe.cache.store.disk import (
    RATES,
    DiskRates,
    Reading,
    keep_rates,
    known_rates,
    read_direct,
    set_direct,
    storage_of,
)
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.cache.store.header import read_header
from vllm_dymoe.cache.store.mapped import in_page_cache
from vllm_dymoe.durable import open_regular
from vllm_dymoe.experts.format import SliceKey, all_keys

WAYS = [Reading(direct=True, depth=4), Reading(drops=True), Reading(check="always"), Reading(bytes_per_second=1e9)]


@pytest.mark.parametrize("old", [0, 5, 6])
@pytest.mark.parametrize("nested", [False, True])
def test_all_ways_and_versions_have_the_same_bytes(tmp_path, old, nested):
    experts = make_experts(nested=nested)
    store = as_older(tmp_path / "store", experts, old) if old else write(tmp_path / "store", experts)
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
    file = open_regular(path)
    if not set_direct(file, direct=True):
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


def test_everything_is_read_past_the_page_cache_unless_it_is_there(store):
    keys = list(all_keys(store.experts))
    for way in (Reading(drops=True), Reading(bytes_per_second=1e9)):
        store.reading = way
        with store.reading_all():
            assert store.reading == way
    store.reading = Reading()
    for key in keys:
        read(store, key)
    if not all(cached(store, key) for key in keys):
        pytest.skip("this file system does not tell what the page cache holds")
    with store.reading_all():
        assert not store.reading.direct
    for path in store.folder.glob("*.safetensors"):
        with path.open() as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if in_page_cache(file.fileno(), 0, path.stat().st_size):
                pytest.skip("this file system is in memory")
    with store.reading_all():
        assert store.reading.direct
    assert store.reading == Reading()


def test_a_way_that_would_wait_says_so(store):
    store.reading = Reading(direct=True)
    if not store._direct:
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
    for measured, rate in ((2, 1e15), (3, 1.0)):  # the disk is first idle, then busy
        direct = dict.fromkeys(found.direct, rate)
        monkeypatch.setattr("vllm_dymoe.cache.store.files.measure_rates", lambda *_: DiskRates(direct, rate, rate))  # noqa: B023
        assert store.rates() == DiskRates(dict.fromkeys(found.direct, 1e15), 1e15, 1e15, measured)
    assert found.cached > 0
    assert found.warm > 0
    store.reading = Reading(direct=True)
    assert bool(found.direct) == store._direct
    monkeypatch.setattr("vllm_dymoe.cache.store.files.measure_rates", lambda *_: pytest.fail("measured again"))
    assert store.rates() == known_rates(store.folder)
    here = json.dumps(storage_of(store.folder))
    spoilt_rates = '{"direct": {}, "cached": 0, "warm": 1}', '{"direct": {"x": 1}}'
    for spoilt in ("{", "[]", *spoilt_rates, *(f"{{{here}: {rates}}}" for rates in spoilt_rates)):
        (store.folder / RATES).write_text(spoilt)
        assert known_rates(store.folder) is None


@pytest.mark.parametrize("other", ["machine", "_mounted"])
def test_rates_hold_for_one_machine_and_one_disk_and_do_not_travel_with_the_folder(store, monkeypatch, other):
    here = DiskRates({}, 1e9, 2e9, measured=3)
    keep_rates(store.folder, here)
    assert known_rates(store.folder) == here
    monkeypatch.setattr(f"vllm_dymoe.cache.store.disk.{other}", lambda *_: "another one")
    assert known_rates(store.folder) is None
    there = replace(store.rates(), cached=1e15)
    keep_rates(store.folder, there)
    monkeypatch.undo()
    assert known_rates(store.folder) == here, "each has its own"


def test_the_disk_of_a_folder_is_told_by_its_mount(tmp_path, monkeypatch):
    mounts, inner = tmp_path / "mountinfo", tmp_path / "with space"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    mounts.write_text(
        f"20 1 8:1 / / rw - ext4 /dev/sda1 rw\n21 20 8:2 / {tmp_path} rw shared:1 - xfs /dev/sdb1 rw\n"
        f"22 21 0:99 / {escaped} rw - nfs4 server:/export rw\n23 21 8:2 / {tmp_path}/oth rw - tmpfs none rw\n"
    )
    monkeypatch.setattr("vllm_dymoe.cache.store.disk._MOUNTS", mounts)
    monkeypatch.setattr("vllm_dymoe.cache.store.disk._BLOCK_DEVICES", tmp_path / "block")
    device = tmp_path / "block" / "8:2" / "device"
    device.mkdir(parents=True)
    (device / "model").write_text("A fast disk\n")
    first, second, third = (storage_of(folder) for folder in (tmp_path / "other", inner / "deeper", Path("/usr")))
    assert first.endswith("xfs /dev/sdb1 A fast disk")
    assert second.endswith("nfs4 server:/export")
    assert third.endswith("ext4 /dev/sda1")
    (device / "model").write_text("A slow disk\n")
    assert storage_of(tmp_path) != first


@pytest.mark.parametrize("way", [Reading(direct=True, depth=2), Reading(), Reading(drops=True)])
def test_bits_that_flip_after_the_first_read_are_noticed_when_the_disk_is_read(store, way):
    """The checksum notices a change that the file's times do not show."""
    key = SliceKey(1, 3, 4)
    store.reading = way
    read(store, key)
    flip(store, key)
    # Renew the stamp of the file, because bits that flip on the disk do not change its times.
    store._stamps[key.layer] = type(store._stamps[0]).of(store._layers[key.layer].file)
    os.posix_fadvise(store._layers[key.layer].file, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(store, key):
        pytest.skip("this file system is in memory")
    with pytest.raises(DamagedStoreError, match=r"expert 3 .* checksum"):
        read(store, key)


def test_a_file_that_is_written_to_is_noticed_even_in_the_page_cache(store):
    key = SliceKey(1, 3, 4)
    read(store, key)
    times = os.stat(store.folder / file_name(2))
    flip(store, key)
    os.utime(store.folder / file_name(2), ns=(times.st_atime_ns, times.st_mtime_ns))  # like rsync, or an attacker
    with pytest.raises(DamagedStoreError):
        read(store, key)


def test_a_mapped_file_that_is_written_to_is_noticed(store):
    key = SliceKey(1, 3, 4)
    read(store, key)
    if not store.in_memory(key):
        pytest.skip("there is no native library")
    before = store.writes()
    flip(store, key)
    assert [now - then for now, then in zip(store.writes(), before, strict=True)] == [0, 1]
    assert not store.in_memory(key)
    assert store.in_memory(SliceKey(0, 3, 4)), "other files are as they were"


def flip(store, key):
    path = store.folder / file_name(store.experts.layers[key.layer])
    byte = store._begin(key) + 100
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def cached(store, key):
    try:
        os.preadv(store._layers[key.layer].file, [bytearray(4096)], store._begin(key) // 4096 * 4096, os.RWF_NOWAIT)
    except OSError:
        return False
    return True


def test_a_store_takes_one_descriptor_for_each_file(store):
    def there():
        return sum(str(store.folder) in os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))

    for way in (Reading(), Reading(direct=True), Reading()):
        store.reading = way
        for key in all_keys(store.experts):
            read(store, key)
            store.in_memory(key)
        assert there() == len(store.experts.layers)


def test_too_many_files_for_this_process_are_refused_before_they_are_opened(store, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (len(os.listdir("/proc/self/fd")) + 2, 1 << 20))
    with pytest.raises(StoreError) as caught:
        FileStore(store.folder)
    assert not isinstance(caught.value, DamagedStoreError)
    assert "ulimit -n" in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, file_name(1), RATES])
def test_a_fifo_in_the_place_of_a_file_does_not_hang(store, name):
    (store.folder / name).unlink(missing_ok=True)
    os.mkfifo(store.folder / name)
    if name == RATES:
        assert known_rates(store.folder) is None
        store.rates()
    else:
        with pytest.raises(StoreError):
            FileStore(store.folder)


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
    assert torch.equal(read(store, SliceKey(1, 3, 4)), want)  # files that are open already stay readable
    os.ftruncate(os.open(f"/proc/self/fd/{store._layers[0].file}", os.O_RDWR), 4096)
    for way in (Reading(), Reading(direct=True)):
        store.reading = way
        with pytest.raises(StoreError, match="truncated"):
            read(store, SliceKey(0, 2, 4))


def test_a_process_that_is_killed_while_memory_fills_leaves_the_store_as_it_was(tmp_path):
    store = write(tmp_path / "store")
    before = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    program = (
        "import sys; from pathlib import Path; from vllm_dymoe.cache.store import FileStore\n"
        "from vllm_dymoe.cache.store.disk import Reading\n"
        "from vllm_dymoe.cache.store import whole_host_cache\n"
        "from vllm_dymoe.cache.host_cache import HostCache\n"
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


def test_a_disk_that_wants_one_read_at_a_time_does_not_wait_for_checksums(tmp_path, monkeypatch):
    """While one expert is checked, another thread reads the next.

    Two threads never read at once.
    """
    store = write(tmp_path / "store")
    store.reading = Reading(direct=True, depth=1)
    if not store._direct:
        pytest.skip("this file system cannot be read past the page cache")
    keys = list(all_keys(store.experts))[:2]
    real, under_way, most, begun = files.read_direct, 0, 0, [threading.Event() for _ in keys]
    lock, check = threading.Lock(), store.check

    def read(file, destination, offset):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            next(event for event in begun if not event.is_set()).set()
        try:
            return real(file, destination, offset)
        finally:
            with lock:
                under_way -= 1

    def checked(*arguments):
        assert begun[1].wait(60), "the second read waits for the first one's checksums"
        check(*arguments)

    monkeypatch.setattr(files, "read_direct", read)
    monkeypatch.setattr(store, "check", checked)
    with ThreadPoolExecutor(store.depth) as pool:
        slots = [torch.empty(store.experts.formats[key.bits].nbytes, dtype=torch.uint8) for key in keys]
        list(pool.map(store.read_into, keys, slots))
    assert most == 1
    store.close()
